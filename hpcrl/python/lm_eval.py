"""The command of lm-evaluation-harness, with the model `hpcrl`:

    python -m hpcrl.python.lm_eval --model hpcrl --model_args path=runs/b/hf --tasks gsm8k

All its other arguments and subcommands are the harness's own; `lm_eval` itself has no way to add a model.
"""

import logging
import sys
from importlib.util import find_spec


def main() -> int:
    """Returns the exit code, 2 for what is refused in one line."""
    if find_spec("lm_eval") is None:
        print("lm_eval is not installed: python -m pip install lm_eval", file=sys.stderr)
        return 2
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if "hpcrl" not in model_registry:
        model_registry.register("hpcrl", target="hpcrl.python.lm_eval_model:HpcrlLM")
    try:
        cli_evaluate()
    except ValueError as error:
        logging.getLogger(__name__).debug("refused", exc_info=True)
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

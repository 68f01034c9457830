"""Benchmarks that data.val takes by name, `benchmark:NAME`: the published file, the reward, and the usual sampling."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.spec.fields import Section

BENCHMARK = "benchmark:"


class BenchmarkOptions(Section):
    """Options of a source `benchmark:NAME`."""

    file: str | None = None
    """File in the published form, or another source of data.val; null: the published file in the local cache."""
    template: str | None = None
    """The prompt, with {question} for the question and all that belongs to it; null: the benchmark's usual prompt."""


@dataclass(frozen=True)
class BenchmarkSpec:
    """A benchmark.

    Attributes:
        about: What it is.
        file: Published file on the hub: ORG/NAME/FILE.
        rows: Import path of the function that reads a row (hpcrl.data.benchmark_rows).
        template: The usual prompt, with {question}.
        reward: Name of the reward.
        samples, temperature: How it is usually sampled.
    """

    about: str
    file: str
    rows: str
    template: str
    reward: str
    samples: int = 1
    temperature: float = 0.0


BOXED = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
LETTER = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n{question}"
)
"""Of openai/simple-evals."""
FUNCTION = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{question}\n```"
)
PROGRAMMER = "You are an expert Python programmer, and here is your task:\n{question}"
"""Of the paper on MBPP (arXiv 2108.07732)."""

BENCHMARKS = {
    "gsm8k": BenchmarkSpec(
        "grade-school maths, 1,319 problems (arXiv 2110.14168)",
        "openai/gsm8k/main/test-00000-of-00001.parquet",
        "hpcrl.data.benchmark_rows:maths",
        BOXED,
        "math",
    ),
    "math500": BenchmarkSpec(
        "500 problems of MATH (arXiv 2305.20050)",
        "HuggingFaceH4/MATH-500/test.jsonl",
        "hpcrl.data.benchmark_rows:maths",
        BOXED,
        "math",
    ),
    "aime24": BenchmarkSpec(
        "30 problems of AIME 2024",
        "math-ai/aime24/test-00000-of-00001.parquet",
        "hpcrl.data.benchmark_rows:maths",
        BOXED,
        "math",
        samples=16,
        temperature=0.6,
    ),
    "aime25": BenchmarkSpec(
        "30 problems of AIME 2025",
        "math-ai/aime25/test.jsonl",
        "hpcrl.data.benchmark_rows:maths",
        BOXED,
        "math",
        samples=16,
        temperature=0.6,
    ),
    "humaneval": BenchmarkSpec(
        "164 Python functions to complete (arXiv 2107.03374)",
        "openai/openai_humaneval/openai_humaneval/test-00000-of-00001.parquet",
        "hpcrl.data.benchmark_rows:humaneval",
        FUNCTION,
        "code",
    ),
    "mbpp": BenchmarkSpec(
        "257 Python tasks of MBPP sanitized; the rows of the full set too (arXiv 2108.07732)",
        "google-research-datasets/mbpp/sanitized/test-00000-of-00001.parquet",
        "hpcrl.data.benchmark_rows:mbpp",
        PROGRAMMER,
        "code",
    ),
    "ifeval": BenchmarkSpec(
        "541 prompts with verifiable instructions (arXiv 2311.07911)",
        "google/IFEval/ifeval_input_data.jsonl",
        "hpcrl.data.benchmark_rows:ifeval",
        "{question}",
        "ifeval",
    ),
    "gpqa_diamond": BenchmarkSpec(
        "198 questions of GPQA with four choices (arXiv 2311.12022)",
        "Idavidrein/gpqa/gpqa_diamond.csv",
        "hpcrl.data.benchmark_rows:gpqa",
        LETTER,
        "choice",
        samples=4,
        temperature=0.6,
    ),
}
"""Name, which is also the domain -> benchmark."""

SUITE = "reasoning_gym_"
SUITES = (
    "algebra", "algorithmic", "arc", "arithmetic", "code", "cognition", "games", "geometry", "graphs", "induction",
    "logic", "probability",
)  # fmt: skip
"""Categories of reasoning-gym's data sets; benchmark:reasoning_gym_CATEGORY has rows of each data set in turn."""


def benchmark_name(path: str) -> str | None:
    """NAME of a path `benchmark:NAME`; None for other paths. ValueError lists the names if there is no such one."""
    if not path.startswith(BENCHMARK):
        return None
    name = path.removeprefix(BENCHMARK)
    if name not in BENCHMARKS and not is_suite(path):
        suites = ", ".join(f"{SUITE}{category}" for category in SUITES)
        raise ValueError(f"{path}: no benchmark {name!r}; there are {', '.join(BENCHMARKS)}, {suites}")
    return name


def is_suite(path: str) -> bool:
    """Whether a path is benchmark:reasoning_gym_CATEGORY."""
    return path.removeprefix(f"{BENCHMARK}{SUITE}") in SUITES and path.startswith(BENCHMARK)

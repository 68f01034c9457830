"""The project's reward."""


def reward(ground_truth: str, response: str) -> tuple[float, bool]:
    """The share of the answer's digits at their places, and whether all are: training uses the share, so a better wrong
    response gets more, and validation counts right responses. `ground_truth` is the row's answer."""
    said, right = response.split(), ground_truth.split()
    if len(said) != len(right):
        return 0.0, False
    share = sum(one == other for one, other in zip(said, right, strict=True)) / len(right)
    return share, share == 1

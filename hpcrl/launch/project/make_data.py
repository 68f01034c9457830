"""Write train.jsonl and val.jsonl: rows of digits to put into descending order. No prompt is in both files."""

import json
import random


def main() -> None:
    rng, seen = random.Random(0), set()
    for name, num_rows in (("train.jsonl", 8000), ("val.jsonl", 500)):
        with open(name, "w") as file:
            while num_rows:
                digits = [rng.choice("0123456789") for _ in range(rng.randint(3, 6))]
                prompt = f"descending: {' '.join(digits)}"
                if prompt not in seen:
                    seen.add(prompt)
                    row = {"prompt": prompt, "answer": " ".join(sorted(digits, reverse=True))}
                    file.write(json.dumps(row) + "\n")
                    num_rows -= 1


if __name__ == "__main__":
    main()

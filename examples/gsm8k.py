"""Writes GSM8K as lines of chats and numbers, for the recipes: python gsm8k.py train gsm8k_train.jsonl

`pip install datasets` first (the extra `data`). Solutions of openai/gsm8k end in `#### 42`.
"""

import json
import sys


def line(row):
    """Turn a row of the data set into a line of the file."""
    answer = row["answer"].rpartition("####")[2].replace(",", "").strip()
    return json.dumps({"prompt": [{"role": "user", "content": row["question"]}], "answer": answer})


if __name__ == "__main__":
    from datasets import load_dataset

    split, path = sys.argv[1:]
    with open(path, "w") as file:
        file.writelines(line(row) + "\n" for row in load_dataset("openai/gsm8k", "main", split=split))

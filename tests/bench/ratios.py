#!/usr/bin/env python3
"""Reads the lines that compare.sh collected and prints one JSON line: medians of both sides and their ratios."""
import collections
import json
import statistics
import sys


def main():
    ours, theirs = collections.defaultdict(list), collections.defaultdict(list)
    with open(sys.argv[1]) as lines:
        for result in map(json.loads, lines):
            if "engine" in result:
                theirs["prefill"].append(result["prefill_tokens_per_second"])
                for streams, rate in result["decode_tokens_per_second"].items():
                    theirs[f"decode_{streams}"].append(rate)
            else:
                is_prefill = result["measured"] == "prefill"
                name = "prefill" if is_prefill else f"decode_{result['streams']}"
                ours[name].append(result["tokens_per_second"])
    summary = {}
    for name in (name for name in ours if name in theirs):
        mine, other = statistics.median(ours[name]), statistics.median(theirs[name])
        summary[name] = {"keepsake": mine, "llama.cpp": other, "ratio": round(mine / other, 2)}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

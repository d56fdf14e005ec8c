#!/usr/bin/env python3
"""Reads the lines that compare.sh collected and prints one JSON line: medians of both sides and their ratios."""
import collections
import json
import statistics
import sys


def main():
    ours, theirs = collections.defaultdict(list), collections.defaultdict(list)
    # What was compared belongs beside the ratios: llama.cpp without repacked weights is not llama.cpp at its best.
    devices = {}
    with open(sys.argv[1]) as lines:
        for result in map(json.loads, lines):
            if "engine" in result:
                repacked = "weights repacked" if result["repacked"] else "weights as in the file"
                devices["llama.cpp"] = f"{result['engine']}, {result['threads']} threads, {repacked}, {result['device']}"
                theirs["prefill"].append(result["prefill_tokens_per_second"])
                for streams, rate in result["decode_tokens_per_second"].items():
                    theirs[f"decode_{streams}"].append(rate)
            else:
                devices["keepsake"] = result["device"]
                is_prefill = result["measured"] == "prefill"
                name = "prefill" if is_prefill else f"decode_{result['streams']}"
                ours[name].append(result["tokens_per_second"])
    summary = {"devices": devices}
    for name in (name for name in ours if name in theirs):
        mine, other = statistics.median(ours[name]), statistics.median(theirs[name])
        summary[name] = {"keepsake": mine, "llama.cpp": other, "ratio": round(mine / other, 2)}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

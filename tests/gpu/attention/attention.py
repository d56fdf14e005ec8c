#!/usr/bin/env python3
"""Checks and times the attention kernels on the GPU at hand.

    attention.py check [--quick] [KERNEL...]
                                    ragged steps against plain attention in f64; prints one line a case
    attention.py bench [decode] [prefill] [NAME=VALUE,...]...
                                    times; each further argument is a variant, macros to compile with

Tolerance of a check: ||out - ref|| / ||ref|| < 5e-3 over a step, and |out - ref| < 0.03 + 0.03 |ref| each (bf16 inputs,
probabilities and outputs, f32 sums); rows of no entry keep what they held; a second launch gives the same bits.
Needs PyTorch with CUDA and NVRTC; KERNELS names another folder of sources, CUBINS a folder to cache cubins in.
"""

import concurrent.futures
import itertools
import math
import statistics
import sys

import torch

import cuda
from cases import Step, decode_launcher, prefill_launcher

MAX_RELATIVE, MAX_EACH = 5e-3, 0.03
SENTINEL = 1024.0
FILES = {
    "attention_decode": "attention_decode.cu",
    "attention_prefill_wgmma": "attention_prefill_wgmma.cu",
    "attention_prefill_mma": "attention_prefill.cu",
}
_major, _minor = torch.cuda.get_device_capability()
HOPPER = _major == 9
_cubins, _kernels = {}, {}


def key_of(name, head_dim, group, chunk_tokens, defines=()):
    return name, head_dim, group, chunk_tokens, tuple(sorted(dict(defines).items()))


def compile_key(key):
    name, head_dim, group, chunk_tokens, defines = key
    defines = {"HEAD_DIM": head_dim, "GROUP": group, "CHUNK_TOKENS": chunk_tokens, **dict(defines)}
    return cuda.compile_cubin(FILES[name], defines, f"sm_{_major}{_minor}" + ("a" if HOPPER else ""))[0]


def compile_all(keys):
    """Compiles at once; what does not compile fails when it is asked for."""
    keys = [k for k in dict.fromkeys(keys) if k not in _cubins]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = {key: pool.submit(compile_key, key) for key in keys}
    _cubins.update((key, future.result()) for key, future in futures.items() if not future.exception())


def kernel(key):
    if key not in _kernels:
        cubin = _cubins.get(key) or compile_key(key)
        _kernels[key] = cuda.Module(cubin).kernel(key[0])
    return _kernels[key]


def prefill_names():
    return ["attention_prefill_wgmma"] * HOPPER + ["attention_prefill_mma"]


def launcher(key, step, split="rule"):
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    if key[0] == "attention_decode":
        return decode_launcher(kernel(key), step, sms)
    return prefill_launcher(kernel(key), step, key[0].endswith("wgmma"), sms, split)


# --- Checks ----------------------------------------------------------------------------------------------------------


def prefill_spans(pick, chunk):
    """Ragged: a fresh prompt, a turn over a past, holes of one conversation, one row, a tile's worth and one more."""
    past = chunk * pick.randrange(1, 12)
    return [
        (0, 0, pick.randrange(1, 300)),
        (1, pick.randrange(1, 500), pick.randrange(2, 200)),
        (2, 0, chunk), (2, past, chunk), (2, past + 3 * chunk, pick.randrange(1, 70)),
        (3, pick.randrange(0, 400), 1),
        (4, 0, 128), (5, 0, 129), (6, 127, 1), (7, 128, 65),
        (8, 0, 0),
    ]


def decode_spans(pick, chunk):
    lengths = [1, 2, chunk - 1, chunk, chunk + 1, 63, 64, 65, 127, 129, pick.randrange(200, 900), pick.randrange(2000, 4000)]
    pick.shuffle(lengths)
    spans = [(i, n - 1, 1) for i, n in enumerate(lengths)]
    for _ in range(3):
        spans.insert(pick.randrange(len(spans) + 1), (99, 0, 0))
    return spans


def check_cases(quick):
    import random

    pick = random.Random(7)
    shapes = [(128, 1, 32), (128, 4, 32), (64, 8, 16), (96, 3, 64), (80, 1, 32), (256, 2, 32), (128, 5, 64), (128, 2, 16)]
    if not quick:
        shapes += [(d, g, c) for d, g, c in itertools.product((64, 80, 96, 128, 256), (1, 2, 3, 4, 5, 8), (16, 32, 64))
                   if (d, g, c) not in shapes and pick.random() < 0.3]
        shapes += [(128, 12, 32), (64, 16, 32), (128, 24, 32), (64, 71, 16)]
    for head_dim, group, chunk in shapes:
        kv_heads = pick.choice((1, 2, 3, 5)) if group > 2 else pick.choice((2, 4, 7))
        for name in ["attention_decode", *prefill_names()]:
            spans = (decode_spans if name == "attention_decode" else prefill_spans)(pick, chunk)
            yield key_of(name, head_dim, group, chunk), kv_heads, spans


    if quick:
        return
    # More entries than a block has threads; a step as large as a server's.
    many = [(i, pick.randrange(1, 600), 1) if pick.random() < 0.6 else (1000, 0, 0) for i in range(300)]
    yield key_of("attention_decode", 128, 4, 32), 8, many
    yield key_of("attention_decode", 128, 1, 32), 40, [(i, pick.randrange(1, 1500), 1) for i in range(64)]
    turns = [(i, pick.randrange(0, 3000), pick.randrange(1, 120)) for i in range(40)]
    for name in prefill_names():
        yield key_of(name, 128, 4, 32), 8, turns


def check(quick, names):
    cases = [case for case in check_cases(quick) if not names or case[0][0] in names]
    compile_all(key for key, _, _ in cases)
    failures = 0
    for seed, (key, kv_heads, spans) in enumerate(cases):
        step = Step(key[1], key[2], kv_heads, key[3], spans, seed)
        reference = step.reference()
        live = ~reference.isnan()
        for split in ("rule", "random") if key[0].endswith("wgmma") else ("none",):
            launch = launcher(key, step, split)
            results = []
            for _ in range(2):  # twice: the counters must come back to zero
                step.out.fill_(SENTINEL)
                launch()
                torch.cuda.synchronize()
                out = step.out.double()
                untouched = bool((out[~live] == SENTINEL).all())
                clean = launch.counters is None or not launch.counters.any().item()
                error = out[live] - reference[live]
                relative = (error.norm() / reference[live].norm()).item()
                each = (error.abs() - MAX_EACH * reference[live].abs()).max().item()
                results.append((relative, each, untouched, clean))
            good = all(r < MAX_RELATIVE and e < MAX_EACH and u and c for r, e, u, c in results)
            good = good and results[0][:2] == results[1][:2]
            failures += not good
            print(f"{'ok  ' if good else 'FAIL'} {key[0]:24} d={key[1]:3} group={key[2]:2} chunk={key[3]:2} "
                  f"kv_heads={kv_heads} split={split:6} relative={results[0][0]:.2e} max={results[0][1]:+.2e}"
                  + ("" if good else f" {results}"), flush=True)
    print(f"{len(cases)} cases, {failures} failures")
    return failures


# --- Times -----------------------------------------------------------------------------------------------------------


def graph_of(launches):
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def seconds_of(graph):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def median_seconds(contenders, rounds=25):
    """For each list of launches the median time of a graph of them, a launch. They take turns, so that all meet the
    same temperatures and clocks; three rounds of warm-up."""
    graphs = [graph_of(launches) for launches in contenders]
    times = [[seconds_of(graph) for graph in graphs] for _ in range(3 + rounds)][3:]
    return [statistics.median(t) / len(launches) for t, launches in zip(zip(*times), contenders)]


def copy_bandwidth():
    """Bytes read and written a second by a device copy, median."""
    a = torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.empty_like(a)
    times = []
    for _ in range(25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * a.numel() * a.element_size() / statistics.median(times)


def describe(defines):
    return ",".join(f"{k}={v}" for k, v in sorted(dict(defines).items())) or "default"


def bench_decode(variants):
    copy = copy_bandwidth()
    print(f"device copy {copy / 1e12:.3f} TB/s (read + write)")
    shapes = [(64, 1024, 40, 40), (64, 8192, 40, 40), (64, 1024, 32, 8), (64, 8192, 32, 8), (8, 8192, 32, 8),
              (1, 8192, 32, 8), (1, 1024, 32, 8)]
    shapes = [(f"{b} x {n}", [n] * b, h, k) for b, n, h, k in shapes]
    ragged = [200 + (i * 2654435761 % 64) * 100 for i in range(64)]
    shapes += [("64 x 200-6500", ragged, 40, 40), ("64 x 200-6500", ragged, 32, 8), ("48 of 64 x 200-6500", ragged, 32, 8)]
    compile_all(key_of("attention_decode", 128, h // k, 32, v) for _, _, h, k in shapes for v in variants)
    print(f"{'rows x keys':>20} {'heads':>7} {'us':>9} {'TB/s':>6} {'of copy':>7}  variant")
    for title, lengths, heads, kv_heads in shapes:
        spans = [(i, n - 1, 1) for i, n in enumerate(lengths)]
        if "of" in title:
            spans = [(64, 0, 0) if i % 4 == 1 else span for i, span in enumerate(spans)]
        # Together far more than the cache, so that no launch finds its keys there.
        sets = max(1, min(8, math.ceil(1.5e9 / (sum(lengths) * kv_heads * 512))))
        steps = [Step(128, heads // kv_heads, kv_heads, 32, spans, seed, padding_rows=0, poison=False)
                 for seed in range(sets)]
        keys = [key_of("attention_decode", 128, heads // kv_heads, 32, variant) for variant in variants]
        contenders = [[launcher(key, step) for step in steps] * max(1, 8 // sets) for key in keys]
        for variant, seconds in zip(variants, median_seconds(contenders)):
            rate = steps[0].kv_bytes_read / seconds
            print(f"{title:>20} {heads:4}/{kv_heads:<2} {seconds * 1e6:9.1f} {rate / 1e12:6.3f} {rate / copy:7.1%}  "
                  f"{describe(variant)}", flush=True)
        del steps, contenders


def bench_prefill(variants):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shapes = [
        # name, spans, heads, kv_heads, head_dim
        ("4 x 8192", [(i, 0, 8192) for i in range(4)], 16, 16, 128),
        ("4 x 8192", [(i, 0, 8192) for i in range(4)], 32, 8, 128),
        ("8 x 512 over 1-8K", [(i, 1024 * (i + 1), 512) for i in range(8)], 32, 8, 128),
        ("8 x 512 over 1-8K", [(i, 1024 * (i + 1), 512) for i in range(8)], 40, 40, 128),
        ("1 x 256 over 4K", [(0, 4096, 256)], 32, 8, 128),
        ("1 x 256 over 32K", [(0, 32768, 256)], 32, 8, 128),
        ("32 x 40 over 1-4K", [(i, 96 * (i + 11), 40) for i in range(32)], 32, 8, 128),
        ("32 x 40 over 1-4K", [(i, 96 * (i + 11), 40) for i in range(32)], 40, 40, 128),
        ("1 x 2048", [(0, 0, 2048)], 32, 8, 128),
        ("4 x 8192", [(i, 0, 8192) for i in range(4)], 16, 16, 64),
        ("4 x 8192", [(i, 0, 8192) for i in range(4)], 16, 16, 96),
        ("4 x 8192", [(i, 0, 8192) for i in range(4)], 8, 8, 256),
    ]
    names = [(n, v) for n in prefill_names() for v in (variants if n.endswith("wgmma") else [()])]
    compile_all(key_of(n, d, h // k, 32, v) for _, _, h, k, d in shapes for n, v in names)
    print(f"{'step':>18} {'heads':>7} {'d':>3} {'us':>9} {'TFLOP/s':>7}  kernel")
    for title, spans, heads, kv_heads, dim in shapes:
        step = Step(dim, heads // kv_heads, kv_heads, 32, spans, 1, padding_rows=0, poison=False)
        pairs = sum(rows * first + rows * (rows + 1) // 2 for _, first, rows in spans)
        flops = 4 * pairs * heads * dim
        contenders = {}
        for name, variant in names:
            key = key_of(name, dim, heads // kv_heads, 32, variant)
            try:
                launch = launcher(key, step)
            except RuntimeError as error:
                print(f"{name} {describe(variant)} d={dim}: {str(error).strip().splitlines()[-1]}")
                continue
            contenders[f"{name} {describe(variant)}"] = launch
            if launch.num_slots:
                contenders[f"{name} {describe(variant)}, tiles not split"] = launcher(key, step, "none")
        if spans[0][1] == 0:
            rows = spans[0][2]
            q = torch.randn(len(spans), heads, rows, dim, dtype=torch.bfloat16, device="cuda")
            k, v = (torch.randn(len(spans), kv_heads, rows, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            for backend, label in ((SDPBackend.CUDNN_ATTENTION, "cuDNN"), (SDPBackend.FLASH_ATTENTION, "FlashAttention-2")):
                def contiguous(q=q, k=k, v=v, backend=backend):
                    with sdpa_kernel(backend):
                        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads > kv_heads)

                contenders[f"(contiguous, PyTorch) {label}"] = contiguous
        for label, seconds in zip(contenders, median_seconds([[launch] * 4 for launch in contenders.values()])):
            print(f"{title:>18} {heads:4}/{kv_heads:<2} {dim:3} {seconds * 1e6:9.1f} {flops / seconds / 1e12:7.1f}  {label}",
                  flush=True)


def main():
    words = sys.argv[2:]
    if sys.argv[1] == "check":
        sys.exit(check("--quick" in words, [w for w in words if w in FILES]) > 0)
    variants = [tuple(pair.split("=") for pair in word.split(",")) for word in words if "=" in word] or [()]
    if "default" in words and () not in variants:
        variants.insert(0, ())
    print(torch.cuda.get_device_name())
    if "prefill" not in words or "decode" in words:
        bench_decode(variants)
    if "decode" not in words or "prefill" in words:
        bench_prefill(variants)


if __name__ == "__main__":
    main()

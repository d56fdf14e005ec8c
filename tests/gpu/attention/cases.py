"""Problems for the attention kernels: ragged steps over a paged pool, launches, and a plain reference."""

import ctypes
import math
import random

import torch

import cuda

NAN = float("nan")


class Step:
    """One layer's K/V and one step's queries and entries, on the GPU.

    `spans` are (conversation, first_position, num_rows); a conversation's keys are all its blocks' tokens up to the
    largest position that a span reaches. Slots past them, and blocks of nobody, hold NaN.
    """

    def __init__(self, head_dim, group, num_kv_heads, chunk_tokens, spans, seed=0, spare_blocks=3, padding_rows=2,
                 poison=True):
        self.head_dim, self.group, self.num_kv_heads, self.chunk_tokens = head_dim, group, num_kv_heads, chunk_tokens
        self.num_heads = group * num_kv_heads
        self.scale = 1.0 / math.sqrt(head_dim)
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        lengths = {}
        for conversation, first, rows in spans:
            if rows:
                lengths[conversation] = max(lengths.get(conversation, 0), first + rows)
        blocks_of = {c: -(-n // chunk_tokens) for c, n in lengths.items()}
        self.num_blocks = sum(blocks_of.values()) + spare_blocks
        order = list(range(self.num_blocks))
        self.random.shuffle(order)
        token_len = num_kv_heads * head_dim
        shape = (self.num_blocks, 2, chunk_tokens, num_kv_heads, head_dim)
        self.kv = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        # Outliers, as real keys have: the running maximum moves.
        self.kv[:, 0, :: 7] *= 3.0
        self.table, first_block, at = [], {}, 0
        for conversation, count in blocks_of.items():
            mine = order[at : at + count]
            at += count
            first_block[conversation] = len(self.table)
            self.table += mine
            used = lengths[conversation] - (count - 1) * chunk_tokens
            if poison:
                self.kv[mine[-1], :, used:] = NAN
        if poison:
            for block in order[at:]:
                self.kv[block] = NAN
        self.entries, row = [], 0
        for conversation, first, rows in spans:
            row += self.random.randrange(padding_rows) if padding_rows else 0
            count = blocks_of.get(conversation, 0)
            self.entries.append((row, rows, first, first_block.get(conversation, 0), count))
            row += rows
        self.num_rows = row + (1 if padding_rows else 0)
        self.q = torch.empty((self.num_rows, self.num_heads, head_dim), dtype=torch.bfloat16, device="cuda").normal_()
        self.out = torch.empty_like(self.q)
        self.table_gpu = torch.tensor(self.table or [0], dtype=torch.int32, device="cuda")
        self.entries_gpu = torch.tensor(self.entries, dtype=torch.int32, device="cuda")
        self.kv_bytes_read = 2 * 2 * token_len * sum(first + rows for _, first, rows in spans if rows)

    def keys_and_values(self, entry):
        """K and V of an entry, `[keys][kv_head][head_dim]` each."""
        _, rows, first, first_block, count = entry
        blocks = self.table_gpu[first_block : first_block + count].long()
        keys = first + rows
        parts = self.kv[blocks].transpose(0, 1).reshape(2, -1, self.num_kv_heads, self.head_dim)
        return parts[0, :keys], parts[1, :keys]

    def reference(self):
        """Plain attention in f64 of the same bf16 inputs; rows of no entry are NaN."""
        out = torch.full(self.q.shape, NAN, dtype=torch.float64, device="cuda")
        for entry in self.entries:
            row, rows, first, _, _ = entry
            if rows == 0:
                continue
            k, v = (x.double().repeat_interleave(self.group, 1) for x in self.keys_and_values(entry))
            q = self.q[row : row + rows].double()
            scores = torch.einsum("rhd,khd->hrk", q, k) * self.scale
            positions = torch.arange(first, first + rows, device="cuda")
            late = torch.arange(k.shape[0], device="cuda")[None, :] > positions[:, None]
            scores.masked_fill_(late[None], -math.inf)
            out[row : row + rows] = torch.einsum("hrk,khd->rhd", scores.softmax(-1), v)
        return out


# Keys of a step of the wgmma form at its longest, and what a block costs beside its steps, in steps (a guess).
STEP_KEYS, TILE_COST, PART_COST = 128, 2, 4


def keys_of(step, entry, first, tile_rows):
    """Keys that the last row of a tile attends."""
    _, rows, position, _, _ = entry
    return position + (min(first + tile_rows, rows * step.group) - 1) // step.group + 1


def choose_part_steps(steps, num_heads, num_sms):
    """Steps a part at most: splits tiles where there are too few to fill the device, by estimated time."""
    longest = max(steps)

    def estimate(limit):
        costs = []
        for n in steps:
            parts = -(-n // limit)
            costs += [-(-n // parts) + (PART_COST if parts > 1 else TILE_COST)] * parts
        mean, count = sum(costs) / len(costs), len(costs) * num_heads
        return -(-count // num_sms) * mean + max(costs) - mean

    if len(steps) * num_heads >= num_sms:
        return longest
    return min((max(4, -(-longest // n)) for n in (1, 2, 3, 4, 6, 8, 12, 16)), key=estimate)


def tiles_of(step, tile_rows, num_sms=0, random_parts=False):
    """The prefill tiles, longest first, and the number of slots for parts. No parts where `num_sms` is 0."""
    tiles = []
    for entry in step.entries:
        for first in range(0, entry[1] * step.group, tile_rows):
            tiles.append((keys_of(step, entry, first, tile_rows), entry, first))
    steps = [-(-keys // STEP_KEYS) for keys, _, _ in tiles]
    part_steps = choose_part_steps(steps, step.num_kv_heads, num_sms) if num_sms else max(steps)
    rows, slots = [], 0
    for (keys, (row, num_rows, position, block, _), first), n in zip(tiles, steps):
        parts = step.random.randint(1, n) if random_parts else -(-n // part_steps)
        for part in range(parts):
            tile = (row, position, block, first, min(tile_rows, num_rows * step.group - first), part, parts, slots)
            rows.append((keys / parts, tile))
        slots += parts if parts > 1 else 0
    rows.sort(key=lambda t: -t[0])
    return torch.tensor([t for _, t in rows], dtype=torch.int32, device="cuda"), slots


u32, f32 = ctypes.c_uint32, ctypes.c_float


def decode_launcher(kernel, step, num_sms):
    """A function that runs the decode kernel on the current stream, with its scratch."""
    grid = num_sms * kernel.launch[3]
    partials = torch.full((grid * kernel.launch[2],), NAN, dtype=torch.float32, device="cuda")
    counters = torch.zeros(len(step.entries) * step.num_kv_heads * -(-step.group // 16), dtype=torch.int32, device="cuda")
    args = [step.q, step.kv, step.table_gpu, step.entries_gpu, u32(len(step.entries)), u32(step.num_kv_heads),
            f32(step.scale), step.out, partials, counters]

    def launch():
        kernel(torch.cuda.current_stream().cuda_stream, (grid, 1, 1), args)

    launch.counters, launch.num_slots = counters, 0
    return launch


def prefill_launcher(kernel, step, wgmma, num_sms, split="rule"):
    """`split`: "rule", "random" or "none"."""
    tile_rows = kernel.launch[2]
    tiles, slots = tiles_of(step, tile_rows, num_sms if wgmma and split == "rule" else 0, wgmma and split == "random")
    common = [step.q, step.table_gpu, tiles, u32(len(tiles)), u32(step.num_kv_heads), f32(step.scale), step.out]
    if wgmma:
        grid = (min(num_sms, len(tiles) * step.num_kv_heads), 1, 1)
        tensor_map, keep = cuda.kv_tensor_map(
            step.kv, step.head_dim, step.num_kv_heads, step.chunk_tokens, step.num_blocks
        )
        floats = slots * step.num_kv_heads * tile_rows * (step.head_dim + 2)
        partials = torch.full((max(1, floats),), NAN, dtype=torch.float32, device="cuda")
        counters = torch.zeros(2 + slots * step.num_kv_heads, dtype=torch.int32, device="cuda")
        args = [tensor_map, *common, partials, counters]
    else:
        grid = (len(tiles), step.num_kv_heads, 1)
        counters, keep, args = None, None, [step.kv, *common]

    def launch():
        kernel(torch.cuda.current_stream().cuda_stream, grid, args)

    launch.counters, launch.keep, launch.num_slots = counters, keep, slots
    return launch

#!/usr/bin/env python3
"""Measures llama.cpp on a GGUF file as `keepsake bench` measures Keepsake, and prints one JSON line.

Prefill of one prompt, then greedy decode of one and of several streams in one batch, through llama_decode itself: no
tokenising, no server. Each figure is the median of --runs repetitions after one that is not counted.

Needs llama-cpp-python (and numpy, which comes with it).
"""
import argparse
import ctypes
import json
import random
import statistics
import time

import llama_cpp as llama
import numpy

DECODE_PROMPT_TOKENS = 16  # as in `keepsake bench`


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens of the prefill measurement")
    parser.add_argument("--decode", type=int, default=128, help="tokens that each stream generates")
    parser.add_argument("--streams", default="1,8", help="numbers of streams to decode at the same time")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-repack", action="store_true",
                        help="leave weights in the file's layout, without AMX kernels: builds by GCC before 14 crash in them")
    arguments = parser.parse_args()
    arguments.streams = [int(number) for number in arguments.streams.split(",")]
    if arguments.runs < 5 or min(arguments.streams) < 1 or arguments.decode < 2 or arguments.prefill < 1:
        parser.error("needs at least 5 runs, 1 stream, 2 tokens to decode and 1 to prefill")
    return arguments


# Kept alive: llama.cpp calls it as long as the process lives.
@llama.llama_log_callback
def no_log(_level, _text, _user_data):
    pass


class Context:
    """One llama.cpp context with room for `num_streams` sequences of `length` tokens each."""

    def __init__(self, model, threads, num_streams, length):
        params = llama.llama_context_default_params()
        # Without kv_unified the context is divided among the sequences, in multiples of 256 tokens.
        params.n_ctx = num_streams * -(-length // 256) * 256
        params.n_batch = max(512, length)
        params.n_ubatch = 512
        params.n_seq_max = num_streams
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = llama.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama.cpp cannot create a context")
        self.batch = llama.llama_batch_init(max(params.n_batch, num_streams), 0, 1)
        self.num_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def close(self):
        llama.llama_batch_free(self.batch)
        llama.llama_free(self.context)

    def clear(self):
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def decode(self, rows):
        """Runs one batch of (token, position, stream, wants_logits); returns the greedy token of each row that wants one."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, stream, wants_logits) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = stream
            batch.logits[index] = wants_logits
        status = llama.llama_decode(self.context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with {status}")
        return [self.greedy(index) for index, row in enumerate(rows) if row[3]]

    def greedy(self, index):
        logits = llama.llama_get_logits_ith(self.context, index)
        array = numpy.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), shape=(self.num_vocab,))
        return int(array.argmax())


def prompt_rows(tokens, stream):
    last = len(tokens) - 1
    return [(token, position, stream, position == last) for position, token in enumerate(tokens)]


def median_rate(runs, once):
    once()
    return round(statistics.median(once() for _ in range(runs)), 2)


def prefill_rate(context, arguments, random_tokens):
    def once():
        context.clear()
        rows = prompt_rows(random_tokens(arguments.prefill), 0)
        started = time.perf_counter()
        context.decode(rows)
        return arguments.prefill / (time.perf_counter() - started)

    return median_rate(arguments.runs, once)


def decode_rate(context, arguments, num_streams, random_tokens):
    """Output tokens a second of all streams together, from their first token to their last."""

    def once():
        context.clear()
        prompts = (prompt_rows(random_tokens(DECODE_PROMPT_TOKENS), stream) for stream in range(num_streams))
        tokens = [context.decode(rows)[0] for rows in prompts]
        started = time.perf_counter()
        for step in range(arguments.decode - 1):
            position = DECODE_PROMPT_TOKENS + step
            tokens = context.decode([(token, position, stream, True) for stream, token in enumerate(tokens)])
        return num_streams * (arguments.decode - 1) / (time.perf_counter() - started)

    return median_rate(arguments.runs, once)


def main():
    arguments = parse_arguments()
    llama.llama_log_set(no_log, ctypes.c_void_p(0))
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.use_extra_bufts = not arguments.no_repack
    model = llama.llama_model_load_from_file(arguments.model.encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {arguments.model}")
    vocab = llama.llama_model_get_vocab(model)
    text_ids = [
        token for token in range(llama.llama_vocab_n_tokens(vocab))
        if not llama.llama_vocab_is_control(vocab, token) and not llama.llama_vocab_is_eog(vocab, token)
    ]
    chooser = random.Random(arguments.seed)

    def random_tokens(count):
        return [chooser.choice(text_ids) for _ in range(count)]

    context = Context(model, arguments.threads, 1, arguments.prefill)
    prefill = prefill_rate(context, arguments, random_tokens)
    context.close()
    decode = {}
    for num_streams in arguments.streams:
        context = Context(model, arguments.threads, num_streams, DECODE_PROMPT_TOKENS + arguments.decode)
        decode[str(num_streams)] = decode_rate(context, arguments, num_streams, random_tokens)
        context.close()
    result = {
        "engine": f"llama-cpp-python {llama.__version__}",
        "device": f"cpu ({llama.llama_print_system_info().decode().strip(' |')})",
        "repacked": not arguments.no_repack,
        "threads": arguments.threads,
        "runs": arguments.runs,
        "prompt_tokens": arguments.prefill,
        "output_tokens": arguments.decode,
        "prefill_tokens_per_second": prefill,
        "decode_tokens_per_second": decode,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Checks chat completions, completions, models, probes and tokenising of a running server with the official `openai` client.

    pip install openai
    python check_chat.py --url http://127.0.0.1:8000
"""

import json
import urllib.error
import urllib.request

import openai

from checks import arguments, client, refused, run

args = arguments(__doc__)
api = client(args)
GREEDY = {"model": "default", "temperature": 0}
HELLO = [{"role": "user", "content": "Say hello."}]


def http(path, body=None, headers=None, raw=None):
    """A request without the client: (status, body)."""
    data = raw if raw is not None else (json.dumps(body).encode() if body is not None else None)
    headers = {"content-type": "application/json", "authorization": "Bearer " + args.api_key, **(headers or {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(args.url + path, data, headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def a_whole_chat_completion():
    completion = api.chat.completions.create(messages=HELLO, max_tokens=8, **GREEDY)
    choice = completion.choices[0]
    assert choice.message.role == "assistant" and choice.message.content, completion
    assert choice.finish_reason in ("stop", "length"), completion
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens, completion
    assert completion.usage.prompt_tokens_details.cached_tokens >= 0, completion


def a_streamed_chat_completion_equals_the_whole_one():
    whole = api.chat.completions.create(messages=HELLO, max_tokens=12, **GREEDY)
    chunks = list(api.chat.completions.create(messages=HELLO, max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert len({(chunk.id, chunk.model, chunk.created) for chunk in chunks}) == 1, chunks
    assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
    assert all(chunk.usage is None for chunk in chunks[:-1]), chunks
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason, chunks[-2]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content, (text, whole.choices[0].message.content)


def a_repeated_prefix_is_cached():
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 12}]
    first = api.chat.completions.create(messages=messages, max_tokens=4, **GREEDY)
    again = api.chat.completions.create(messages=messages, max_tokens=4, **GREEDY)
    assert again.choices[0].message.content == first.choices[0].message.content, (first, again)
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens // 32 * 32 - 32, again.usage


def stop_strings_end_the_text_before_them():
    plain = api.chat.completions.create(messages=HELLO, max_tokens=24, extra_body={"ignore_eos": True}, **GREEDY)
    text = plain.choices[0].message.content
    middle = text[len(text) // 2:][:4]
    stopped = api.chat.completions.create(messages=HELLO, max_tokens=24, stop=[middle], extra_body={"ignore_eos": True}, **GREEDY)
    assert stopped.choices[0].message.content == text[:text.index(middle)], (text, middle, stopped)
    assert stopped.choices[0].finish_reason == "stop", stopped
    pieces = api.chat.completions.create(messages=HELLO, max_tokens=24, stop=middle, stream=True, extra_body={"ignore_eos": True}, **GREEDY)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert streamed == stopped.choices[0].message.content, (streamed, stopped)


def completions_of_text_and_of_ids_are_equal():
    status, body = http("/tokenize", {"prompt": "Once upon a time", "add_special_tokens": True})
    assert status == 200, body
    tokens = json.loads(body)["tokens"]
    by_ids = api.completions.create(prompt=tokens, max_tokens=8, **GREEDY)
    by_text = api.completions.create(prompt="Once upon a time", max_tokens=8, **GREEDY)
    assert by_ids.choices[0].text == by_text.choices[0].text, (by_ids, by_text)
    assert by_ids.usage.prompt_tokens == len(tokens), (by_ids.usage, tokens)
    chunks = list(api.completions.create(prompt=tokens, max_tokens=8, stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == by_ids.choices[0].text, chunks
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == len(tokens), chunks[-1]
    both = api.completions.create(prompt=[tokens, tokens[:2]], max_tokens=4, **GREEDY)
    assert [choice.index for choice in both.choices] == [0, 1], both


def a_seed_makes_sampling_repeatable():
    def sample(seed):
        request = {"model": "default", "messages": HELLO, "temperature": 1.5, "max_tokens": 16, "seed": seed}
        return api.chat.completions.create(extra_body={"ignore_eos": True}, **request).choices[0].message.content

    assert sample(7) == sample(7)


def models_are_listed():
    models = api.models.list().data
    assert len(models) == 1 and models[0].object == "model", models
    assert api.models.retrieve(models[0].id).id == models[0].id
    refused(openai.NotFoundError, 404, "model", lambda: api.models.retrieve("gpt-4"))


def tokenize_and_detokenize_are_inverse():
    text = "Zürich, 北京, 🙂 and <|im_end|> stay text."
    status, body = http("/tokenize", {"prompt": text, "add_special_tokens": False})
    answer = json.loads(body)
    assert status == 200 and answer["count"] == len(answer["tokens"]) and answer["max_model_len"] > 0, body
    status, body = http("/detokenize", {"tokens": answer["tokens"]})
    assert status == 200 and json.loads(body)["prompt"] == text, body


def probes_and_metrics_answer():
    assert http("/health")[0] == 200
    assert http("/ready")[0] == 200
    status, text = http("/metrics")
    assert status == 200
    for name in ("keepsake_num_requests_running", "keepsake_tokens_total", "keepsake_time_to_first_token_seconds_bucket", "keepsake_blocks"):
        assert name in text, name


def errors_are_exceptions_of_the_right_class():
    def create(**request):
        return lambda: api.chat.completions.create(**{"model": "default", "messages": HELLO, **request})

    bad = openai.BadRequestError
    refused(bad, 400, "messages", create(messages=[]))
    refused(bad, 400, "messages[0].role", create(messages=[{"role": "root", "content": "x"}]))
    refused(bad, 400, "n", create(n=2))
    refused(bad, 400, "logprobs", create(logprobs=True))
    refused(bad, 400, "top_p", create(top_p=0))
    refused(bad, 400, "stop", create(stop=[str(i) for i in range(17)]))
    refused(bad, 400, "response_format", create(response_format={"type": "json_object"}))
    refused(openai.NotFoundError, 404, "model", create(model="gpt-4"))
    refused(bad, 400, "prompt[0]", lambda: api.completions.create(model="default", prompt=[10**9]))
    too_long = refused(bad, 400, "messages", create(messages=[{"role": "user", "content": "word " * 200_000}]))
    assert too_long.code == "context_length_exceeded", too_long


def hostile_bodies_are_4xx_and_the_server_goes_on():
    for raw, expected in [
        (b"", 400),
        (b"{", 400),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e308}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400),
        (b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
        (b'{"x": "' + b"y" * 10_000_000 + b'"}', 413),
    ]:
        status, body = http("/v1/chat/completions", raw=raw)
        assert status == expected, (raw[:60], status, body[:200])
        assert json.loads(body)["error"]["message"], body[:200]
    status, body = http("/v1/chat/completions", raw=b"{}", headers={"content-type": "text/plain"})
    assert status == 415, (status, body)
    status, body = http("/v1/models", headers={"host": "evil.example.org"})
    assert status == 403 or not args.url.startswith("http://127."), (status, body)
    a_whole_chat_completion()


run([
    a_whole_chat_completion,
    a_streamed_chat_completion_equals_the_whole_one,
    a_repeated_prefix_is_cached,
    stop_strings_end_the_text_before_them,
    completions_of_text_and_of_ids_are_equal,
    a_seed_makes_sampling_repeatable,
    models_are_listed,
    tokenize_and_detokenize_are_inverse,
    probes_and_metrics_answer,
    errors_are_exceptions_of_the_right_class,
    hostile_bodies_are_4xx_and_the_server_goes_on,
])

"""Checks /v1/responses of a running server with the official `openai` client.

    pip install openai
    python check_responses.py --url http://127.0.0.1:8000
"""

import openai

from checks import arguments, client, refused, run

args = arguments(__doc__)
api = client(args)
GREEDY = {"model": "default", "temperature": 0}
CHUNK_TOKENS = 32


def stream_turn(**request):
    """One streamed turn: checks the order of its events and returns the final response."""
    kinds, sequence, pieces, last = [], [], [], None
    for event in api.responses.create(stream=True, **GREEDY, **request):
        kinds.append(event.type)
        sequence.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        last = event
    assert sequence == list(range(len(sequence))), sequence
    head = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    tail = ["response.output_text.done", "response.content_part.done", "response.output_item.done", last.type]
    assert kinds[:4] == head and kinds[-4:] == tail, kinds
    assert set(kinds[4:-4]) <= {"response.output_text.delta"}, kinds
    assert last.type in ("response.completed", "response.incomplete"), last.type
    assert "".join(pieces) == last.response.output_text, (pieces, last.response.output_text)
    assert "\ufffd" not in last.response.output_text, last.response.output_text
    return last.response


def three_streamed_turns_reuse_what_came_before():
    words = "We will talk about a cat whose name is Ferdinand. "
    previous, before = None, 0
    for text in (words * 8 + "Say hello.", "What is the cat's name?", "Say it again."):
        extra = {"previous_response_id": previous} if previous else {}
        response = stream_turn(input=text, max_output_tokens=24, **extra)
        usage = response.usage
        cached = usage.input_tokens_details.cached_tokens
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens, usage
        assert usage.input_tokens > before, (usage, before)
        assert usage.output_tokens <= 24, usage
        if previous:
            # The last sampled token has no K/V yet, and only whole chunks are kept.
            assert cached >= (before - 1) // CHUNK_TOKENS * CHUNK_TOKENS, (cached, before)
        assert cached <= usage.input_tokens, usage
        tiers = usage.model_extra["keepsake"]["tiers"]
        assert sum(tiers.values()) == cached, (tiers, cached)
        assert usage.model_extra["keepsake"]["ttft_ms"] > 0, usage
        assert response.previous_response_id == previous, response
        previous, before = response.id, usage.input_tokens + usage.output_tokens


def whole_and_streamed_replies_are_equal():
    whole = api.responses.create(input="Count to three.", max_output_tokens=16, **GREEDY)
    streamed = stream_turn(input="Count to three.", max_output_tokens=16)
    assert whole.output_text == streamed.output_text, (whole.output_text, streamed.output_text)
    assert whole.id != streamed.id
    assert whole.status in ("completed", "incomplete"), whole.status


def forks_of_one_turn_both_succeed():
    root = api.responses.create(input="Remember the word plum.", max_output_tokens=8, **GREEDY)
    texts = [stream_turn(input="Which word?", previous_response_id=root.id, max_output_tokens=8).output_text for _ in range(2)]
    assert texts[0] == texts[1], texts


def the_helper_that_accumulates_a_stream_works():
    with api.responses.stream(input="Say hi.", max_output_tokens=400, **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text, (deltas, final.output_text)


def the_output_limit_makes_a_response_incomplete():
    response = api.responses.create(input="Tell a long story.", max_output_tokens=3, extra_body={"ignore_eos": True}, **GREEDY)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens", response
    assert response.usage.output_tokens == 3, response.usage


def extra_sampling_fields_are_accepted():
    extra = {"ignore_eos": True, "min_tokens": 4, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7, "stop": ["zzzz"]}
    response = api.responses.create(model="default", input="Go on.", max_output_tokens=4, temperature=0.8, top_p=0.9, extra_body=extra)
    assert response.usage.output_tokens == 4, response.usage
    assert response.temperature == 0.8 and response.top_p == 0.9, response


def stored_responses_are_read_and_deleted():
    made = api.responses.create(
        input=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "input_text", "text": "Hi."}]}],
        metadata={"purpose": "check"}, max_output_tokens=4, **GREEDY)
    read = api.responses.retrieve(made.id)
    assert read.output_text == made.output_text and read.metadata == {"purpose": "check"}, read
    assert read.usage.input_tokens == made.usage.input_tokens, (read.usage, made.usage)
    items = api.responses.input_items.list(made.id).data
    assert [item.role for item in items] == ["user", "system"], items
    api.responses.delete(made.id)
    refused(openai.NotFoundError, 404, None, lambda: api.responses.retrieve(made.id))
    refused(openai.NotFoundError, 404, None, lambda: api.responses.delete(made.id))


def unstored_responses_leave_nothing():
    made = api.responses.create(input="Hi.", store=False, max_output_tokens=4, **GREEDY)
    assert made.store is False, made
    refused(openai.NotFoundError, 404, None, lambda: api.responses.retrieve(made.id))


def errors_are_exceptions_of_the_right_class():
    def create(**request):
        return lambda: api.responses.create(**{"model": "default", "input": "x", **request})

    bad = openai.BadRequestError
    refused(bad, 400, "temperature", create(temperature=9))
    refused(bad, 400, "temperature", create(extra_body={"temperature": "hot"}))
    refused(bad, 400, "max_output_tokens", create(max_output_tokens=-1))
    refused(bad, 400, "input", create(input=[]))
    refused(bad, 400, "input[0].content[0].type", create(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]))
    refused(bad, 400, "truncation", create(truncation="auto"))
    refused(bad, 400, "tools", create(tools=[{"type": "function", "name": "f", "parameters": {}, "strict": True}]))
    refused(bad, 400, "text.format", create(text={"format": {"type": "json_object"}}))
    refused(openai.NotFoundError, 404, "model", create(model="gpt-4"))
    too_long = refused(bad, 400, "input", create(input="word " * 200_000))
    assert too_long.code == "context_length_exceeded", too_long
    for unknown in ("resp_" + "0" * 32, "resp_nonsense", "x"):
        error = refused(openai.NotFoundError, 404, "previous_response_id", create(previous_response_id=unknown))
        assert error.code == "response_not_found", error


run([
    three_streamed_turns_reuse_what_came_before,
    whole_and_streamed_replies_are_equal,
    forks_of_one_turn_both_succeed,
    the_helper_that_accumulates_a_stream_works,
    the_output_limit_makes_a_response_incomplete,
    extra_sampling_fields_are_accepted,
    stored_responses_are_read_and_deleted,
    unstored_responses_leave_nothing,
    errors_are_exceptions_of_the_right_class,
])

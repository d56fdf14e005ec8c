//! One turn over each of the three generating endpoints. Everything is greedy unless a field says otherwise, so equal
//! prompts must give equal replies.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context};
use serde_json::{json, Map, Value};

use crate::{Client, Event, Events};

/// What a reply cost, by the server's own word.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub input: u64,
    pub output: u64,
    pub cached: u64,
    /// Cached tokens by tier.
    pub tiers: BTreeMap<String, u64>,
    pub recomputed: u64,
}

impl Usage {
    /// Reads either wire format and checks that its parts agree.
    fn parse(usage: &Value) -> anyhow::Result<Self> {
        let number = |value: &Value| value.as_u64().with_context(|| format!("not a count in {usage}"));
        let (input, output, details) = match usage.get("input_tokens") {
            Some(_) => ("input_tokens", "output_tokens", "input_tokens_details"),
            None => ("prompt_tokens", "completion_tokens", "prompt_tokens_details"),
        };
        let tiers = usage["keepsake"]["tiers"].as_object().context("no tiers in usage")?;
        let tiers: anyhow::Result<_> = tiers.iter().map(|(tier, n)| Ok((tier.clone(), number(n)?))).collect();
        let parsed = Self {
            input: number(&usage[input])?,
            output: number(&usage[output])?,
            cached: number(&usage[details]["cached_tokens"])?,
            tiers: tiers?,
            recomputed: number(&usage["keepsake"]["recomputed"])?,
        };
        ensure!(number(&usage["total_tokens"])? == parsed.input + parsed.output, "the total is not the sum: {usage}");
        ensure!(parsed.tiers.values().sum::<u64>() == parsed.cached, "the tiers do not add up: {usage}");
        ensure!(parsed.cached + parsed.recomputed < parsed.input, "the last token is always computed: {usage}");
        Ok(parsed)
    }

    pub fn tier(&self, name: &str) -> u64 {
        self.tiers.get(name).copied().unwrap_or(0)
    }
}

/// A finished reply of any endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Of `/v1/responses`: can be continued. Otherwise only a name.
    pub id: String,
    pub text: String,
    /// It ended by itself or at a stop string, not at a length.
    pub stopped: bool,
    pub usage: Usage,
}

impl Reply {
    /// From a response object.
    pub fn of_response(object: &Value) -> anyhow::Result<Self> {
        let stopped = match object["status"].as_str() {
            Some("completed") => true,
            Some("incomplete") => {
                ensure!(object["incomplete_details"]["reason"] == "max_output_tokens", "why incomplete? {object}");
                false
            }
            _ => bail!("not a finished response: {object}"),
        };
        let text = object["output"][0]["content"][0]["text"].as_str().context("no output text")?;
        let id = object["id"].as_str().context("no id")?;
        let usage = Usage::parse(&object["usage"])?;
        Ok(Self { id: id.to_owned(), text: text.to_owned(), stopped, usage })
    }

    /// From a completion or chat completion.
    fn of_completion(object: &Value) -> anyhow::Result<Self> {
        let choice = &object["choices"][0];
        let text = choice.get("text").unwrap_or(&choice["message"]["content"]);
        let stopped = match choice["finish_reason"].as_str() {
            Some("stop") => true,
            Some("length") => false,
            other => bail!("finish_reason {other:?}"),
        };
        Ok(Self {
            id: object["id"].as_str().context("no id")?.to_owned(),
            text: text.as_str().context("no text")?.to_owned(),
            stopped,
            usage: Usage::parse(&object["usage"])?,
        })
    }
}

/// A turn over `/v1/responses`.
#[derive(Clone, Debug)]
pub struct Ask(Map<String, Value>);

impl Ask {
    pub fn new(input: &str) -> Self {
        Self(fields(json!({ "input": input, "temperature": 0 })))
    }

    pub fn after(self, previous_response_id: &str) -> Self {
        self.with("previous_response_id", json!(previous_response_id))
    }

    pub fn max(self, tokens: usize) -> Self {
        self.with("max_output_tokens", json!(tokens))
    }

    /// Random, but the same at each call. Generated weights say the same few tokens over and over when they are greedy; so
    /// drawn, every token depends on each one before it.
    pub fn sampled(self, seed: usize) -> Self {
        self.with("temperature", json!(1)).with("seed", json!(seed))
    }

    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.0.insert(field.to_owned(), value);
        self
    }

    pub fn body(&self) -> Value {
        Value::Object(self.0.clone())
    }

    #[track_caller]
    pub fn send(&self, client: &Client) -> Reply {
        self.try_send(client).unwrap_or_else(|error| panic!("{:?}: {error:#}", self.0))
    }

    /// Anything but a finished reply is an error.
    pub fn try_send(&self, client: &Client) -> anyhow::Result<Reply> {
        let answer = client.try_post("/v1/responses", &self.body())?;
        ensure!(answer.status == 200, "{} {}", answer.status, answer.text);
        Reply::of_response(&answer.json())
    }

    pub fn stream(&self, client: &Client) -> anyhow::Result<ReplyStream> {
        ReplyStream::open(client.stream("/v1/responses", &self.clone().with("stream", json!(true)).body())?)
    }
}

/// A streamed response under way.
pub struct ReplyStream {
    pub id: String,
    events: Events,
    next_sequence: u64,
    kinds: Vec<String>,
    /// The deltas so far.
    pub deltas: Vec<String>,
}

impl ReplyStream {
    fn open(events: Events) -> anyhow::Result<Self> {
        let mut stream = Self { id: String::new(), events, next_sequence: 0, kinds: Vec::new(), deltas: Vec::new() };
        let created = stream.next()?.context("an empty stream")?;
        ensure!(created["type"] == "response.created", "the first event is {created}");
        stream.id = created["response"]["id"].as_str().context("no id in response.created")?.to_owned();
        Ok(stream)
    }

    /// Waits for the next delta; `None` when there will be no more.
    pub fn next_delta(&mut self) -> anyhow::Result<Option<String>> {
        while let Some(event) = self.next()? {
            match event["type"].as_str() {
                Some("response.output_text.delta") => {
                    let delta = event["delta"].as_str().context("no delta")?.to_owned();
                    self.deltas.push(delta.clone());
                    return Ok(Some(delta));
                }
                Some("response.output_text.done") => {
                    ensure!(event["text"] == json!(self.deltas.concat()), "the deltas are not the text: {event}");
                    return Ok(None);
                }
                Some("response.failed") => bail!("the response failed: {event}"),
                _ => {}
            }
        }
        bail!("the stream ended before its text did")
    }

    /// Reads to the end, and checks the official order of events.
    pub fn finish(mut self) -> anyhow::Result<(Reply, Vec<String>)> {
        while self.next_delta()?.is_some() {}
        let mut last = Value::Null;
        while let Some(event) = self.next()? {
            last = event;
        }
        let head =
            ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"];
        let tail = ["response.output_text.done", "response.content_part.done", "response.output_item.done"];
        let (num_head, num_tail) = (head.len(), tail.len() + 1);
        ensure!(self.kinds.len() >= num_head + num_tail, "too few events: {:?}", self.kinds);
        let (start, rest) = self.kinds.split_at(num_head);
        let (middle, end) = rest.split_at(rest.len() - num_tail);
        ensure!(start == head, "the stream begins with {start:?}");
        ensure!(middle.iter().all(|kind| kind == "response.output_text.delta"), "amid the deltas: {middle:?}");
        ensure!(end[..tail.len()] == tail, "the stream ends with {end:?}");
        let reply = Reply::of_response(&last["response"])?;
        let expected = if reply.stopped { "response.completed" } else { "response.incomplete" };
        ensure!(end[tail.len()] == expected, "the last event is {end:?}");
        ensure!(reply.id == self.id, "the id changed on the way");
        ensure!(reply.text == self.deltas.concat(), "the deltas are not the final text");
        Ok((reply, self.deltas))
    }

    fn next(&mut self) -> anyhow::Result<Option<Value>> {
        let (kind, event) = match self.events.next_event()? {
            None => return Ok(None),
            Some(Event::Done) => bail!("[DONE] has no place in a response stream"),
            Some(Event::Data(kind, event)) => (kind, event),
        };
        ensure!(kind.as_deref() == event["type"].as_str(), "event line {kind:?} of {event}");
        ensure!(event["sequence_number"] == json!(self.next_sequence), "wanted number {}: {event}", self.next_sequence);
        self.next_sequence += 1;
        self.kinds.push(kind.unwrap_or_default());
        Ok(Some(event))
    }
}

/// A request to `/v1/chat/completions`.
#[derive(Clone, Debug)]
pub struct Chat(Map<String, Value>);

impl Chat {
    /// Messages as (role, content).
    pub fn new(messages: &[(&str, &str)]) -> Self {
        let messages: Vec<Value> =
            messages.iter().map(|(role, text)| json!({ "role": role, "content": text })).collect();
        Self(fields(json!({ "messages": messages, "temperature": 0 })))
    }

    pub fn max(self, tokens: usize) -> Self {
        self.with("max_tokens", json!(tokens))
    }

    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.0.insert(field.to_owned(), value);
        self
    }

    pub fn body(&self) -> Value {
        Value::Object(self.0.clone())
    }

    #[track_caller]
    pub fn send(&self, client: &Client) -> Reply {
        let object = client.post("/v1/chat/completions", &self.body()).ok();
        Reply::of_completion(&object).unwrap_or_else(|error| panic!("{error:#} in {object}"))
    }
}

/// A request to `/v1/completions` with token ids.
#[derive(Clone, Debug)]
pub struct Complete(Map<String, Value>);

impl Complete {
    pub fn new(prompt: &[u32], max_tokens: usize) -> Self {
        Self(fields(json!({ "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true })))
    }

    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.0.insert(field.to_owned(), value);
        self
    }

    pub fn body(&self) -> Value {
        Value::Object(self.0.clone())
    }

    #[track_caller]
    pub fn send(&self, client: &Client) -> Reply {
        let object = client.post("/v1/completions", &self.body()).ok();
        Reply::of_completion(&object).unwrap_or_else(|error| panic!("{error:#} in {object}"))
    }

    /// Streamed: the time from sending to the first chunk with text, and the usage.
    pub fn time_first_token(&self, client: &Client) -> (Duration, Usage) {
        let body =
            self.clone().with("stream", json!(true)).with("stream_options", json!({ "include_usage": true })).body();
        let started = Instant::now();
        let mut events = client.stream("/v1/completions", &body).expect("the stream opens");
        let mut first = None;
        let mut usage = Value::Null;
        while let Some(event) = events.next_event().expect("the stream goes on") {
            let Event::Data(_, chunk) = event else { break };
            if first.is_none() {
                first = Some(started.elapsed());
            }
            if chunk["usage"].is_object() {
                usage = chunk["usage"].clone();
            }
        }
        let usage = Usage::parse(&usage).expect("the last chunk has the usage");
        (first.expect("a stream has chunks"), usage)
    }
}

fn fields(body: Value) -> Map<String, Value> {
    match body {
        Value::Object(map) => map,
        other => unreachable!("the bodies above are objects, not {other}"),
    }
}

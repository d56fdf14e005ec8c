//! HTTP as a well-behaved client speaks it.

use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use ureq::http::Response;
use ureq::{Agent, Body};

use crate::Events;

/// No answer takes longer, however busy the machine: beyond it, something hangs.
const LIMIT: Duration = Duration::from_secs(240);

#[derive(Clone)]
pub struct Client {
    base: String,
    authorization: Option<String>,
    agent: Agent,
}

/// A whole answer, whatever its status.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    /// Seconds.
    pub retry_after: Option<u64>,
    pub text: String,
}

impl Client {
    pub fn new(address: &str, key: Option<&str>) -> Self {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(LIMIT))
            // A pooled connection that the server closes at the same moment would be a failure of the test, not of it.
            .max_idle_connections(0)
            .build()
            .new_agent();
        Self { base: format!("http://{address}"), authorization: key.map(|key| format!("Bearer {key}")), agent }
    }

    pub fn get(&self, path: &str) -> Answer {
        let request = self.agent.get(self.url(path));
        let request = match &self.authorization {
            Some(value) => request.header("authorization", value),
            None => request,
        };
        let answer = request.call().context("no answer").and_then(Answer::read);
        answer.unwrap_or_else(|error| panic!("GET {path}: {error:#}"))
    }

    pub fn delete(&self, path: &str) -> Answer {
        let request = self.agent.delete(self.url(path));
        let request = match &self.authorization {
            Some(value) => request.header("authorization", value),
            None => request,
        };
        let answer = request.call().context("no answer").and_then(Answer::read);
        answer.unwrap_or_else(|error| panic!("DELETE {path}: {error:#}"))
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.try_post(path, body).unwrap_or_else(|error| panic!("POST {path}: {error:#}"))
    }

    /// An error means that there was no answer: the server went away.
    pub fn try_post(&self, path: &str, body: &Value) -> anyhow::Result<Answer> {
        Answer::read(self.send(path, body.to_string().as_bytes())?)
    }

    /// A body as it is, still declared to be JSON.
    pub fn post_bytes(&self, path: &str, body: &[u8]) -> Answer {
        let answer = self.send(path, body).and_then(Answer::read);
        answer.unwrap_or_else(|error| panic!("POST {path}, {} bytes: {error:#}", body.len()))
    }

    /// Server-sent events; anything but 200 is an error that quotes the answer.
    pub fn stream(&self, path: &str, body: &Value) -> anyhow::Result<Events> {
        let response = self.send(path, body.to_string().as_bytes())?;
        if response.status() != 200 {
            let answer = Answer::read(response)?;
            anyhow::bail!("POST {path}: {} {}", answer.status, answer.text);
        }
        let kind = response.headers().get("content-type").map(|kind| kind.to_str().unwrap_or_default().to_owned());
        anyhow::ensure!(kind.is_some_and(|kind| kind.starts_with("text/event-stream")), "not an event stream");
        Ok(Events::new(response.into_body().into_reader()))
    }

    fn send(&self, path: &str, body: &[u8]) -> anyhow::Result<Response<Body>> {
        let request = self.agent.post(self.url(path)).content_type("application/json");
        let request = match &self.authorization {
            Some(value) => request.header("authorization", value),
            None => request,
        };
        request.send(body).context("no answer")
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
}

impl Answer {
    fn read(mut response: Response<Body>) -> anyhow::Result<Self> {
        let retry_after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        let text = response.body_mut().read_to_string().context("the answer broke off")?;
        Ok(Self { status: response.status().as_u16(), retry_after, text })
    }

    /// The body of a 200.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("not JSON ({error}): {}", self.text))
    }

    /// Checks that this is a refusal in OpenAI's shape, all four fields present; gives its `code`.
    #[track_caller]
    pub fn refusal(&self) -> String {
        assert!((400..600).contains(&self.status), "{}: {}", self.status, self.text);
        let body = self.json();
        let error = &body["error"];
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{}", self.text);
        assert!(error["type"].is_string(), "{}", self.text);
        let fields = error.as_object().expect("checked above");
        for name in ["param", "code"] {
            assert!(fields.get(name).is_some_and(|v| v.is_null() || v.is_string()), "{name} in {}", self.text);
        }
        error["code"].as_str().unwrap_or_default().to_owned()
    }
}

//! The HTTP side: one streamed request a turn, in its own thread so that Ctrl-C is heard while the server thinks.

use std::fmt;
use std::io::BufReader;
use std::sync::mpsc::{sync_channel, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use serde::Serialize;
use serde_json::Value;
use ureq::http::{Request as HttpRequest, Response};
use ureq::{Agent, Body};

use super::interrupt::Interrupt;
use super::sse::{Event, EventData};
use super::usage::TurnCost;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a waiting turn looks whether it was interrupted.
const POLL: Duration = Duration::from_millis(50);
/// Events between the reading thread and the screen.
const QUEUED_EVENTS: usize = 64;

#[derive(Clone)]
pub(super) struct Client {
    agent: Agent,
    /// Without a slash at its end.
    base: String,
    authorization: Option<String>,
}

/// The body of `POST /v1/responses`.
#[derive(Serialize)]
pub(super) struct Request<'a> {
    pub(super) model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) instructions: Option<&'a str>,
    pub(super) input: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) previous_response_id: Option<&'a str>,
}

pub(super) struct Reply {
    pub(super) id: String,
    pub(super) usage: TurnCost,
    pub(super) is_cut: bool,
}

/// Why a turn failed; one line.
#[derive(Debug)]
pub(super) enum TurnFailure {
    Refused { status: u16, message: String },
    Unreachable(String),
    Broken(String),
    Interrupted,
}

impl Client {
    pub(super) fn new(url: &str, api_key: Option<&str>) -> anyhow::Result<Self> {
        let base = url.trim_end_matches('/');
        // Official clients are given the URL with `/v1`: take that too.
        let base = base.strip_suffix("/v1").unwrap_or(base);
        if !base.starts_with("http://") {
            bail!("--url {url}: must begin with http:// (TLS ends at a proxy before the server)");
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // A keepsake server is reached directly; HTTP_PROXY is meant for the world outside.
            .proxy(None)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .build();
        let authorization = api_key.map(|key| format!("Bearer {key}"));
        Ok(Self { agent: config.new_agent(), base: base.to_owned(), authorization })
    }

    /// The name of the first model that the server lists.
    pub(super) fn served_model(&self) -> anyhow::Result<String> {
        let request = self.request("GET", "/v1/models").body(()).map_err(|error| anyhow!("{}: {error}", self.base))?;
        let mut response = self.agent.run(request).map_err(|error| anyhow!("{}", self.unreachable(&error)))?;
        if response.status() != 200 {
            bail!("{}: {}", self.base, refused(&mut response));
        }
        let text = response.body_mut().read_to_string().unwrap_or_default();
        let models: Value = serde_json::from_str(&text).unwrap_or_default();
        match models["data"][0]["id"].as_str() {
            Some(name) => Ok(name.to_owned()),
            None => bail!("{}: /v1/models lists no model; is this a keepsake server?", self.base),
        }
    }

    /// Plays one turn. Text goes to `show` as it comes, which answers whether more is wanted.
    pub(super) fn respond(
        &self,
        request: &Request<'_>,
        interrupt: &Interrupt,
        mut show: impl FnMut(&str) -> bool,
    ) -> Result<Reply, TurnFailure> {
        let mut body = serde_json::to_value(request).expect("a request is plain strings");
        body["stream"] = true.into();
        body["store"] = true.into();
        let started = Instant::now();
        let mut first_text = None;
        let (sender, events) = sync_channel(QUEUED_EVENTS);
        let client = self.clone();
        // Not joined: once the receiver is gone it ends at the next event (the server pings a silent stream), and the
        // closed connection ends the turn on the server.
        let read = move || client.read_events(body.to_string(), &sender);
        let thread = std::thread::Builder::new().name("chat-stream".to_owned()).spawn(read);
        thread.map_err(|error| TurnFailure::Broken(format!("cannot start a thread: {error}")))?;
        loop {
            if interrupt.is_set() {
                return Err(TurnFailure::Interrupted);
            }
            match events.recv_timeout(POLL) {
                Ok(Ok(Event::Text(text))) => {
                    first_text.get_or_insert_with(|| started.elapsed());
                    if !show(&text) {
                        return Err(TurnFailure::Interrupted);
                    }
                }
                Ok(Ok(Event::Finished { id, usage, is_cut })) => {
                    let usage = TurnCost::from_usage(&usage, first_text.unwrap_or_else(|| started.elapsed()));
                    return Ok(Reply { id, usage, is_cut });
                }
                Ok(Ok(Event::Failed(message))) => return Err(TurnFailure::Broken(message)),
                Ok(Ok(Event::Other)) | Err(RecvTimeoutError::Timeout) => {}
                Ok(Err(failure)) => return Err(failure),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(TurnFailure::Broken("the server ended the stream early".to_owned()));
                }
            }
        }
    }

    /// Runs in its own thread: sends each event of the response until its end, or until nobody listens.
    fn read_events(&self, body: String, events: &SyncSender<Result<Event, TurnFailure>>) {
        let response = match self.post(body) {
            Ok(response) => response,
            Err(failure) => {
                let _ = events.send(Err(failure));
                return;
            }
        };
        for data in EventData(BufReader::new(response.into_body().into_reader())) {
            let event = match data {
                Ok(data) => Ok(Event::parse(&data)),
                Err(error) => Err(TurnFailure::Broken(format!("the connection broke: {error}"))),
            };
            if events.send(event).is_err() {
                return;
            }
        }
    }

    fn post(&self, body: String) -> Result<Response<Body>, TurnFailure> {
        let request = self.request("POST", "/v1/responses").header("content-type", "application/json").body(body);
        let request = request.map_err(|error| TurnFailure::Broken(error.to_string()))?;
        let mut response = self.agent.run(request).map_err(|error| self.unreachable(&error))?;
        if response.status() != 200 {
            return Err(refused(&mut response));
        }
        Ok(response)
    }

    fn request(&self, method: &str, path: &str) -> ureq::http::request::Builder {
        let request = HttpRequest::builder().method(method).uri(format!("{}{path}", self.base));
        match &self.authorization {
            Some(authorization) => request.header("authorization", authorization),
            None => request,
        }
    }

    fn unreachable(&self, error: &ureq::Error) -> TurnFailure {
        // ureq says "io: " before what the system says.
        let reason = match error {
            ureq::Error::Io(error) => error.to_string(),
            error => error.to_string(),
        };
        TurnFailure::Unreachable(format!("no server at {}: {reason}", self.base))
    }
}

/// What an answer that is no success says, in OpenAI's error shape or not.
fn refused(response: &mut Response<Body>) -> TurnFailure {
    let status = response.status().as_u16();
    let text = response.body_mut().read_to_string().unwrap_or_default();
    let body: Value = serde_json::from_str(&text).unwrap_or_default();
    let message = body["error"]["message"].as_str().unwrap_or("the server gave no reason").to_owned();
    TurnFailure::Refused { status, message }
}

impl TurnFailure {
    /// The turn before is gone, or cannot be continued.
    pub(super) fn is_about_the_conversation(&self) -> bool {
        matches!(self, Self::Refused { status: 404 | 409, .. })
    }
}

impl fmt::Display for TurnFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = match self {
            Self::Refused { status, message } => format!("{message} (HTTP {status})"),
            Self::Unreachable(message) | Self::Broken(message) => message.clone(),
            Self::Interrupted => "interrupted; the conversation goes on before this message".to_owned(),
        };
        f.write_str(&line.split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// A server that takes one request and gives this answer.
    fn serve(answer: String) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let length = socket.read(&mut request).unwrap();
            assert!(request[..length].starts_with(b"POST /v1/responses "));
            socket.write_all(answer.as_bytes()).unwrap();
        });
        format!("http://{address}/v1/")
    }

    fn say(url: &str) -> (String, Result<Reply, TurnFailure>) {
        let request = Request { model: "m", instructions: None, input: "hi", previous_response_id: None };
        let mut shown = String::new();
        let show = |text: &str| {
            shown.push_str(text);
            true
        };
        let reply = Client::new(url, Some("key")).unwrap().respond(&request, &Interrupt::never(), show);
        (shown, reply)
    }

    const OPENING: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n\
                           data: {\"type\":\"response.output_text.delta\",\"delta\":\"Hel\"}\n\n";

    #[test]
    fn text_and_the_end_of_a_stream() {
        let ending = "data: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_1\",\"usage\":{\"input_tokens\":2}}}\n\n";
        let (shown, reply) = say(&serve(format!("{OPENING}{ending}")));
        let reply = reply.unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!((shown.as_str(), reply.id.as_str(), reply.is_cut), ("Hel", "resp_1", false));
    }

    #[test]
    fn a_stream_without_its_last_event_failed() {
        let (shown, reply) = say(&serve(OPENING.to_owned()));
        let failure = reply.err().unwrap().to_string();
        assert_eq!((shown.as_str(), failure.as_str()), ("Hel", "the server ended the stream early"));
    }

    #[test]
    fn refusals_and_absent_servers_are_one_line() {
        let refusal = "HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\n{\"error\":{\"message\":\"no\\nresponse\"}}";
        let (_, reply) = say(&serve(refusal.to_owned()));
        let failure = reply.err().unwrap();
        assert_eq!(failure.to_string(), "no response (HTTP 404)");
        assert!(failure.is_about_the_conversation());

        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = Client::new(&format!("http://{free}"), None).unwrap().served_model().unwrap_err().to_string();
        assert!(error.starts_with(&format!("no server at http://{free}: ")), "{error}");
        assert!(!error.contains('\n'));
        assert!(Client::new("https://example.com", None).is_err());
    }
}

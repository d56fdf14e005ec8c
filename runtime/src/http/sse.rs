//! Server-sent events: a turn's events become the frames of one response body.

use std::time::Duration;

use actix_web::http::header;
use actix_web::web::Bytes;
use actix_web::HttpResponse;
use futures_util::stream::LocalBoxStream;
use futures_util::{stream, Stream, StreamExt};
use serde::Serialize;

use super::generation::ended_early;
use super::service::RunningTurn;
use crate::messages::session::TurnEvent;

/// One wire format's view of a turn.
pub(crate) trait Encoder: 'static {
    /// Frames that go out before the turn says anything; may be empty.
    fn open(&mut self) -> String;
    /// Frames of one event; may be empty. After `Finished` and `Failed` the body ends.
    fn encode(&mut self, event: TurnEvent) -> String;
}

/// A comment, which clients skip: it keeps proxies from closing a silent stream.
const PING: &str = ": ping\n\n";

/// The body pulls from the turn: what the socket does not take is not made. Dropping the body drops the turn.
pub(crate) fn respond(turn: RunningTurn, encoder: impl Encoder, ping: Duration) -> HttpResponse {
    HttpResponse::Ok()
        .content_type("text/event-stream; charset=utf-8")
        .insert_header((header::CACHE_CONTROL, "no-cache"))
        // nginx buffers answers unless told not to.
        .insert_header(("x-accel-buffering", "no"))
        .streaming(frames(turn, encoder, ping))
}

struct State<E> {
    events: LocalBoxStream<'static, TurnEvent>,
    encoder: E,
    ping: Duration,
    is_open: bool,
    ended: bool,
}

fn frames(
    turn: RunningTurn,
    encoder: impl Encoder,
    ping: Duration,
) -> impl Stream<Item = Result<Bytes, actix_web::Error>> {
    let state = State { events: turn.events, encoder, ping, is_open: false, ended: false };
    stream::unfold(state, |mut state| async move {
        let frame = state.next().await?;
        Some((Ok(Bytes::from(frame)), state))
    })
}

impl<E: Encoder> State<E> {
    /// The next frames that are not empty.
    async fn next(&mut self) -> Option<String> {
        if !self.is_open {
            self.is_open = true;
            let opening = self.encoder.open();
            if !opening.is_empty() {
                return Some(opening);
            }
        }
        while !self.ended {
            let Ok(event) = tokio::time::timeout(self.ping, self.events.next()).await else {
                return Some(PING.to_owned());
            };
            let event = event.unwrap_or_else(|| TurnEvent::Failed(ended_early()));
            self.ended = matches!(event, TurnEvent::Finished(_) | TurnEvent::Failed(_));
            let frames = self.encoder.encode(event);
            if !frames.is_empty() {
                return Some(frames);
            }
        }
        None
    }
}

/// Appends one event. JSON text holds no line breaks, so it is one `data:` line.
pub(crate) fn push_frame(out: &mut String, event: Option<&str>, data: &impl Serialize) {
    if let Some(event) = event {
        out.push_str("event: ");
        out.push_str(event);
        out.push('\n');
    }
    out.push_str("data: ");
    out.push_str(&serde_json::to_string(data).expect("wire types serialise"));
    out.push_str("\n\n");
}

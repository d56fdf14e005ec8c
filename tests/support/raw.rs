//! Requests byte by byte, for what no well-behaved client sends: broken heads, foreign hosts, clients that leave.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use serde_json::Value;

use crate::Answer;

const LIMIT: Duration = Duration::from_secs(120);

/// A connection of its own. Dropping it closes it.
pub struct Connection {
    stream: TcpStream,
}

impl Connection {
    pub fn open(address: &str) -> Self {
        let stream = TcpStream::connect(address).expect("the server accepts connections");
        stream.set_read_timeout(Some(LIMIT)).expect("a limit above zero");
        stream.set_write_timeout(Some(LIMIT)).expect("a limit above zero");
        stream.set_nodelay(true).expect("a TCP socket");
        Self { stream }
    }

    /// A server that has seen enough may close while the rest is being sent: not this function's business.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes).and_then(|()| self.stream.flush());
    }

    /// Says that nothing more will come, as a client that waits for the answer may.
    pub fn close_writing(&mut self) {
        // The server may have closed already.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// A POST as any client would write it.
    pub fn post(&mut self, path: &str, body: &Value) {
        let body = body.to_string();
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        self.send((head + &body).as_bytes());
    }

    /// Waits until the answer has begun to arrive and `marker` is in it; gives what came so far.
    pub fn read_until(&mut self, marker: &str) -> String {
        let mut received = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let text = String::from_utf8_lossy(&received).into_owned();
            if text.contains(marker) {
                return text;
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => panic!("the server closed before {marker:?}: {text}"),
                Ok(count) => received.extend_from_slice(&buffer[..count]),
                Err(error) => panic!("waiting for {marker:?} ({error}): {text}"),
            }
        }
    }

    /// One whole answer with a content length; `None` when the server closed without one.
    pub fn answer(&mut self) -> Option<Answer> {
        let mut received = Vec::new();
        let mut buffer = [0; 16 * 1024];
        loop {
            if let Some(answer) = parse(&received) {
                return Some(answer);
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(count) => received.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("no answer ({error}): {}", String::from_utf8_lossy(&received)),
            }
        }
    }
}

/// `None`: not complete yet.
fn parse(received: &[u8]) -> Option<Answer> {
    let end = received.windows(4).position(|bytes| bytes == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&received[..end]).to_ascii_lowercase();
    let status = head.split_whitespace().nth(1).and_then(|status| status.parse().ok());
    let header = |name: &str| -> Option<u64> {
        let lines = head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        lines.and_then(|value| value.trim().parse().ok())
    };
    let length = header("content-length").unwrap_or(0) as usize;
    let body = received.get(end + 4..end + 4 + length)?;
    Some(Answer {
        status: status.unwrap_or_else(|| panic!("no status in {head:?}")),
        retry_after: header("retry-after"),
        text: String::from_utf8_lossy(body).into_owned(),
    })
}

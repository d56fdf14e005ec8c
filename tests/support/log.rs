//! What a server wrote to standard error.

use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::Value;

/// Lines so far, read by a thread of its own. Log lines are JSON objects; whatever is not (a panic, an abort) stays as text.
#[derive(Clone, Default)]
pub struct Log {
    lines: Arc<Mutex<Vec<String>>>,
}

impl Log {
    pub(crate) fn read(pipe: impl Read + Send + 'static) -> Self {
        let log = Self::default();
        let lines = log.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines() {
                let Ok(line) = line else { return };
                lines.lines().push(line);
            }
        });
        log
    }

    /// A field of the first event with this message.
    pub fn field(&self, message: &str, field: &str) -> Option<Value> {
        let lines = self.lines();
        let mut events = lines.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        events.find(|event| event["message"] == message).map(|event| event[field].clone())
    }

    pub fn contains(&self, text: &str) -> bool {
        self.lines().iter().any(|line| line.contains(text))
    }

    /// Lines that a healthy server never writes: panics, and events of level ERROR.
    pub fn alarms(&self) -> Vec<String> {
        let is_alarm = |line: &&String| {
            let level = serde_json::from_str::<Value>(line).map(|event| event["level"].clone());
            line.contains("panicked at") || level.is_ok_and(|level| level == "ERROR")
        };
        self.lines().iter().filter(is_alarm).cloned().collect()
    }

    /// The last lines, for the report of a failed test.
    pub fn tail(&self, num_lines: usize) -> String {
        let lines = self.lines();
        lines[lines.len().saturating_sub(num_lines)..].join("\n")
    }

    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.lines.lock().expect("no reader of the log panics while it holds it")
    }
}

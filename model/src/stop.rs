//! Stop strings in streamed text.

/// Passes text on until a stop string is complete, and holds back what may become one.
///
/// The text ends before the stop string that completes first; of several that complete with the same character, before
/// the longest. So the result does not depend on how the text was cut into pushes.
pub struct StopMatcher {
    stops: Vec<String>,
    /// Text not passed on yet: the longest suffix that begins a stop string.
    held: String,
    stopped: bool,
}

/// What one push lets through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopStep {
    pub text: String,
    /// A stop string was completed; nothing comes after this.
    pub stopped: bool,
}

impl StopMatcher {
    /// Empty strings are ignored: they would stop every text before it begins.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), held: String::new(), stopped: false }
    }

    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped {
            return StopStep { text: String::new(), stopped: true };
        }
        self.held.push_str(text);
        if let Some(start) = self.first_stop() {
            self.stopped = true;
            self.held.truncate(start);
            return StopStep { text: std::mem::take(&mut self.held), stopped: true };
        }
        let kept = self.held.split_off(self.held.len() - self.len_to_hold());
        StopStep { text: std::mem::replace(&mut self.held, kept), stopped: false }
    }

    /// What was held back at the end of a text that no stop string ended.
    pub fn finish(self) -> String {
        self.held
    }

    /// Where the stop string that completes first begins.
    fn first_stop(&self) -> Option<usize> {
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        found.min().map(|(_, start)| start)
    }

    /// Length in bytes of the longest suffix of the held text that a stop string begins with.
    fn len_to_hold(&self) -> usize {
        let prefixes = self.stops.iter().flat_map(|stop| {
            let ends = stop.char_indices().map(|(at, _)| at).skip(1);
            ends.filter(|&at| self.held.ends_with(&stop[..at]))
        });
        prefixes.max().unwrap_or(0)
    }
}

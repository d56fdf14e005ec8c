//! Bounds-checked reading of little-endian values from a file's bytes.

/// Where parsing stopped and why; [`GgufFile`](super::GgufFile) adds the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub place: String,
    pub reason: String,
}

impl Fault {
    pub fn new(place: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { place: place.into(), reason: reason.into() }
    }
}

/// A position in the file. `context` is the key or tensor being read, for messages.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    offset: usize,
    context: String,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0, context: "header".to_owned() }
    }

    pub fn offset(&self) -> usize {
        self.offset
    }

    pub fn set_context(&mut self, context: impl Into<String>) {
        self.context = context.into();
    }

    pub fn fault(&self, reason: impl Into<String>) -> Fault {
        Fault::new(format!("{} at byte {}", self.context, self.offset), reason)
    }

    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.offset
    }

    pub fn take(&mut self, len: usize) -> Result<&'a [u8], Fault> {
        if len > self.remaining() {
            return Err(self.fault(format!("truncated: {len} bytes wanted, {} left", self.remaining())));
        }
        let taken = &self.bytes[self.offset..self.offset + len];
        self.offset += len;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let taken = self.take(N)?;
        Ok(taken.try_into().expect("take returns exactly N bytes"))
    }

    pub fn u32(&mut self) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count of things that each take at least `min_bytes_each` of what is left of the file,
    /// so that a hostile count is refused before anything is allocated for it.
    pub fn count(&mut self, what: &str, cap: usize, min_bytes_each: usize) -> Result<usize, Fault> {
        let count = self.u64()?;
        if count > cap as u64 {
            return Err(self.fault(format!("{count} {what}, at most {cap} are accepted")));
        }
        let count = count as usize;
        let fits = self.remaining() / min_bytes_each;
        if count > fits {
            return Err(
                self.fault(format!("truncated: {count} {what} cannot fit in the {} bytes left", self.remaining()))
            );
        }
        Ok(count)
    }

    pub fn string(&mut self, max_bytes: usize) -> Result<String, Fault> {
        let len = self.count("string bytes", max_bytes, 1)?;
        let bytes = self.take(len)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(self.fault("string is not valid UTF-8")),
        }
    }
}

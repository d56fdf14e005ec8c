//! What a tier's memory is, as far as the rest of the system must know.

/// Facts about a tier that routes and the runtime's core decide by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capability {
    /// Chunks survive a restart of the process; `recover` finds them.
    pub durable: bool,
    /// Other processes may see the same chunks.
    pub shared: bool,
    /// [`crate::Place::host_slice`] and [`crate::Pinned::host_slice`] give the chunk's memory itself, so a copy to or
    /// from it needs no staging buffer.
    pub host_addressable: bool,
    /// The chunk lies in device memory: attention can read it in place, and a copy to it completes layer by layer.
    pub device_addressable: bool,
}

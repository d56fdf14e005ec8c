//! What can go wrong in this crate: a caller passed shapes that do not fit, or the machine lacks a device.

/// Errors of devices, pools, weights and operations.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// Lengths, ranges or counts that do not fit each other. The operation did nothing.
    #[error("{op}: {reason}")]
    Shape { op: &'static str, reason: String },
    /// The device was asked for by name and is not there.
    #[error("device {kind}: {reason}")]
    DeviceUnavailable { kind: &'static str, reason: String },
    /// Memory for a pool or a buffer could not be had.
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory { what: &'static str, bytes: usize },
    /// A GPU's memory could not be had.
    #[error("cannot allocate {bytes} bytes on the GPU for {what}: {free_bytes} are free")]
    DeviceOutOfMemory { what: &'static str, bytes: usize, free_bytes: usize },
    /// A call of the CUDA driver, NVRTC or cuBLASLt failed. Most such errors spoil the context: end the process.
    #[error("{call}: {reason}")]
    Cuda { call: &'static str, reason: String },
}

/// Result of this crate.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;

pub(crate) fn shape<T>(op: &'static str, reason: impl Into<String>) -> Result<T> {
    Err(KernelError::Shape { op, reason: reason.into() })
}

/// `Err(Shape)` with the formatted reason unless the condition holds.
macro_rules! ensure {
    ($op:expr, $cond:expr, $($arg:tt)+) => {
        if !$cond {
            return $crate::error::shape($op, format!($($arg)+));
        }
    };
}
pub(crate) use ensure;

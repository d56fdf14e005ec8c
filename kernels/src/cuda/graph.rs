//! A captured sequence of operations that one call starts again.

use std::sync::Arc;

use cudarc::driver::sys;

use super::call::{check, check_quietly};
use super::context::Context;
use super::stream::Stream;
use crate::error::Result;

/// Operations with fixed addresses and sizes. What they read may change between launches; the buffers must outlive it.
pub struct Graph {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
}

// SAFETY: a handle; launches of one graph are ordered by the caller's stream.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `enqueue` puts into the stream instead of running it. Everything it uses has been used once before, so
    /// that nothing is loaded, allocated or chosen while recording. No thread drops device or pinned memory meanwhile: that
    /// waits for the device, which a recording forbids.
    pub fn capture(stream: &Stream, enqueue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let context = stream.context().clone();
        context.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not being captured: captures begin and end in this function only.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) })?;
        let enqueued = enqueue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture that began above ends here, also after an error.
        let ended = unsafe { sys::cuStreamEndCapture(stream.raw(), &mut graph) };
        enqueued?;
        check("cuStreamEndCapture", ended)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph is whole; it is not needed once instantiated.
        let instantiated = unsafe {
            let instantiated = sys::cuGraphInstantiateWithFlags(&mut raw, graph, 0);
            check_quietly(sys::cuGraphDestroy(graph));
            instantiated
        };
        check("cuGraphInstantiate", instantiated)?;
        Ok(Graph { context, raw })
    }

    /// Enqueues all of it.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both are alive and of one context.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.raw, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Launches that are under way end first.
        if self.context.synchronize().is_ok() {
            // SAFETY: instantiated once, destroyed once.
            check_quietly(unsafe { sys::cuGraphExecDestroy(self.raw) });
        }
    }
}

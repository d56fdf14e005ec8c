//! Slots of equal size in a few big allocations.

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::ptr::NonNull;

use parking_lot::Mutex;

/// Segments are at most this large, so that no single allocation of hundreds of gigabytes is needed.
const SEGMENT_BYTES: usize = 1 << 30;
/// At most the allocator's own alignment: beyond it `alloc_zeroed` would write the zeros itself and touch every page.
const ALIGNMENT: usize = 16;

pub(super) struct Slab {
    segments: Vec<Segment>,
    chunk_bytes: usize,
    chunks_per_segment: usize,
    free: Mutex<Vec<u32>>,
}

struct Segment {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a segment is plain memory without ties to a thread; `Slab` hands out pointers only, and whoever dereferences
// them owns the slot (see `Storage`).
unsafe impl Send for Segment {}
// SAFETY: as above; no method gives a reference into the memory.
unsafe impl Sync for Segment {}

impl Slab {
    /// `None` when the system does not give the memory.
    pub(super) fn new(chunk_bytes: usize, num_chunks: usize) -> Option<Self> {
        let last = u32::try_from(num_chunks).ok()?;
        let chunks_per_segment = (SEGMENT_BYTES / chunk_bytes).clamp(1, num_chunks);
        let mut slab =
            Self { segments: Vec::new(), chunk_bytes, chunks_per_segment, free: Mutex::new((0..last).rev().collect()) };
        let mut num_left = num_chunks;
        while num_left > 0 {
            let num_here = num_left.min(chunks_per_segment);
            slab.segments.push(Segment::new(num_here.checked_mul(chunk_bytes)?)?);
            num_left -= num_here;
        }
        Some(slab)
    }

    pub(super) fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    pub(super) fn take(&self) -> Option<u32> {
        self.free.lock().pop()
    }

    pub(super) fn give_back(&self, slot: u32) {
        self.free.lock().push(slot);
    }

    /// Where a slot's `chunk_bytes` begin.
    pub(super) fn memory(&self, slot: u32) -> NonNull<u8> {
        let (segment, index) = (slot as usize / self.chunks_per_segment, slot as usize % self.chunks_per_segment);
        let start = self.segments[segment].start;
        // SAFETY: `index` is under the number of chunks that the segment was allocated for.
        unsafe { start.add(index * self.chunk_bytes) }
    }
}

impl Segment {
    fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes, ALIGNMENT).ok()?;
        if bytes == 0 {
            return None;
        }
        // SAFETY: the size is not zero. Zeroed memory of this size comes straight from the kernel, untouched.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start, layout })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed only here.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

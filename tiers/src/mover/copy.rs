//! One chunk's copy, from its pin to its committed place.

use std::time::Instant;

use keepsake_kernels::KvLayout;

use super::staging::StagingPool;
use super::{MoveError, OnLayer};
use crate::{route, Pinned, Place, Route, TierError};

/// Copies and commits. Whatever happens, `to` is used up; `from` stays with the caller.
pub(super) fn copy_chunk(
    from: &Pinned,
    mut to: Place,
    layout: &KvLayout,
    staging: &StagingPool,
    deadline: Option<Instant>,
    mut on_layer: Option<OnLayer>,
) -> Result<(), MoveError> {
    check_deadline(deadline)?;
    let mut progress = Progress { layout, deadline, on_layer: &mut on_layer };
    match route(from.capability(), to.capability()) {
        Route::Direct => copy_direct(from, &mut to, staging, &mut progress)?,
        Route::ViaHost => copy_via_host(from, &mut to, staging, &mut progress)?,
    }
    check_deadline(deadline)?;
    Ok(to.commit()?)
}

struct Progress<'a> {
    layout: &'a KvLayout,
    deadline: Option<Instant>,
    on_layer: &'a mut Option<OnLayer>,
}

fn copy_direct(
    from: &Pinned,
    to: &mut Place,
    staging: &StagingPool,
    progress: &mut Progress<'_>,
) -> Result<(), MoveError> {
    if let Some(source) = from.host_slice() {
        return write(source, to, progress);
    }
    if let Some(target) = to.host_slice() {
        return from.read(0, target).map_err(read_failed);
    }
    // A tier that promises host memory and gives none is slow, not wrong.
    copy_via_host(from, to, staging, progress)
}

fn copy_via_host(
    from: &Pinned,
    to: &mut Place,
    staging: &StagingPool,
    progress: &mut Progress<'_>,
) -> Result<(), MoveError> {
    let mut buffer = staging.take();
    let bytes = &mut buffer.bytes[..];
    let num_bytes = from.num_bytes().min(bytes.len());
    from.read(0, &mut bytes[..num_bytes]).map_err(read_failed)?;
    write(&bytes[..num_bytes], to, progress)
}

/// Towards the device layer by layer, so that a step can attend over the first layers while the last ones travel.
fn write(source: &[u8], to: &mut Place, progress: &mut Progress<'_>) -> Result<(), MoveError> {
    if !to.capability().device_addressable {
        return Ok(to.write(0, source)?);
    }
    for layer in 0..progress.layout.num_layers {
        check_deadline(progress.deadline)?;
        let range = progress.layout.layer_range_in_chunk(layer);
        to.write(range.start, &source[range])?;
        if let Some(on_layer) = progress.on_layer.as_mut() {
            on_layer(layer);
        }
    }
    Ok(())
}

/// A source that cannot be asked now is no full destination.
fn read_failed(error: TierError) -> MoveError {
    match error {
        TierError::ReadOnly { .. } | TierError::Full { .. } => MoveError::Fault(error),
        error => error.into(),
    }
}

fn check_deadline(deadline: Option<Instant>) -> Result<(), MoveError> {
    match deadline {
        Some(deadline) if Instant::now() >= deadline => Err(MoveError::TimedOut),
        _ => Ok(()),
    }
}

//! Activations of one step, sized once for the largest step.

use keepsake_kernels::{Activations, Buffer, Device, InputForms};

use crate::config::HParams;
use crate::error::ModelError;

/// Buffers of a decoder-only transformer; shapes are per row.
pub(crate) struct Scratch {
    /// The residual stream, `hidden`.
    pub x: Buffer,
    /// The residual stream of the sampled rows only, `hidden`.
    pub sampled_x: Buffer,
    /// `query_dim`
    pub q: Buffer,
    /// `kv_dim`
    pub k: Buffer,
    /// `kv_dim`
    pub v: Buffer,
    /// `query_dim`
    pub attended: Buffer,
    /// `ffn`
    pub gate: Buffer,
    /// `ffn`
    pub up: Buffer,
    /// Whatever the next product reads.
    pub input: Activations,
    /// `vocab_size` for each sampled row; grows to the largest number of them seen.
    pub logits: Buffer,
}

impl Scratch {
    pub fn new(device: &Device, hparams: &HParams, forms: InputForms, max_rows: usize) -> Result<Self, ModelError> {
        let rows_of = |width: usize| match max_rows.checked_mul(width) {
            Some(len) => Ok(Buffer::zeros(device, len)?),
            None => Err(ModelError::Shape(format!("{max_rows} rows of {width} overflow"))),
        };
        let widest = hparams.hidden.max(hparams.query_dim()).max(hparams.ffn);
        Ok(Self {
            x: rows_of(hparams.hidden)?,
            sampled_x: rows_of(hparams.hidden)?,
            q: rows_of(hparams.query_dim())?,
            k: rows_of(hparams.kv_dim())?,
            v: rows_of(hparams.kv_dim())?,
            attended: rows_of(hparams.query_dim())?,
            gate: rows_of(hparams.ffn)?,
            up: rows_of(hparams.ffn)?,
            input: Activations::new(device, max_rows, widest, forms)?,
            logits: Buffer::zeros(device, hparams.vocab_size)?,
        })
    }

    pub fn reserve_logits(&mut self, device: &Device, vocab_size: usize, num_rows: usize) -> Result<(), ModelError> {
        if self.logits.len() < num_rows * vocab_size {
            self.logits = Buffer::zeros(device, num_rows * vocab_size)?;
        }
        Ok(())
    }
}

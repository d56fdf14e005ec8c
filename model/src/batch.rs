//! One step's input, and what makes it sound.

use keepsake_kernels::{BlockId, Entry};

use crate::config::HParams;
use crate::error::ModelError;

/// Rows of one forward pass. A row is one token at one position of one sequence.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    /// Where a row's K/V goes: block * chunk_tokens + offset.
    pub slots: Vec<u32>,
    /// Runs of rows with consecutive positions, in row order, covering every row.
    pub entries: Vec<Entry>,
    /// Blocks of all entries; an entry names its part of it.
    pub block_table: Vec<BlockId>,
    /// Rows whose logits are wanted, ascending.
    pub sample_rows: Vec<u32>,
}

/// What a batch may refer to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub max_rows: usize,
    pub num_blocks: usize,
    pub chunk_tokens: usize,
}

impl Batch {
    pub fn num_rows(&self) -> usize {
        self.tokens.len()
    }

    /// A step is planned by another crate and executed by unsafe code: everything it refers to is
    /// checked here, once a step.
    pub(crate) fn validate(&self, hparams: &HParams, limits: Limits) -> Result<(), ModelError> {
        let rows = self.num_rows();
        if rows == 0 || rows > limits.max_rows {
            return refuse(format!("{rows} rows, not 1 to {}", limits.max_rows));
        }
        if self.positions.len() != rows || self.slots.len() != rows {
            return refuse(format!("{rows} tokens, {} positions, {} slots", self.positions.len(), self.slots.len()));
        }
        if let Some(token) = self.tokens.iter().find(|&&t| t as usize >= hparams.vocab_size) {
            return refuse(format!("token {token} is not in the vocabulary"));
        }
        let mut next_row = 0;
        for entry in &self.entries {
            if entry.first_row as usize != next_row || entry.num_rows == 0 {
                return refuse(format!("entry at row {}, row {next_row} is next", entry.first_row));
            }
            self.validate_entry(entry, hparams, limits)?;
            next_row += entry.num_rows as usize;
        }
        if next_row != rows {
            return refuse(format!("entries cover {next_row} of {rows} rows"));
        }
        if self.sample_rows.iter().any(|&row| row as usize >= rows)
            || self.sample_rows.windows(2).any(|pair| pair[0] >= pair[1])
        {
            return refuse("sample_rows are not ascending rows".to_owned());
        }
        self.validate_distinct_slots()
    }

    fn validate_entry(&self, entry: &Entry, hparams: &HParams, limits: Limits) -> Result<(), ModelError> {
        let first_row = entry.first_row as usize;
        let end_row = first_row + entry.num_rows as usize;
        let end_position = entry.first_position as usize + entry.num_rows as usize;
        let first_block = entry.first_block as usize;
        let blocks = self.block_table.get(first_block..first_block + entry.num_blocks as usize);
        let Some(blocks) = blocks else {
            return refuse(format!("blocks of row {first_row} leave the block table"));
        };
        if end_row > self.num_rows() {
            return refuse(format!("entry at row {first_row} ends at row {end_row}"));
        }
        if end_position > hparams.max_context {
            return refuse(format!("position {} is past the context of {}", end_position - 1, hparams.max_context));
        }
        if end_position > blocks.len() * limits.chunk_tokens {
            return refuse(format!("{} blocks do not hold {end_position} positions", blocks.len()));
        }
        if let Some(block) = blocks.iter().find(|block| block.0 as usize >= limits.num_blocks) {
            return refuse(format!("block {} is not in the pool", block.0));
        }
        for row in first_row..end_row {
            let position = entry.first_position as usize + row - first_row;
            let block = blocks[position / limits.chunk_tokens].0 as usize;
            let slot = block * limits.chunk_tokens + position % limits.chunk_tokens;
            if self.positions[row] as usize != position || self.slots[row] as usize != slot {
                return refuse(format!(
                    "row {row} is position {} in slot {}, its entry says {position} in {slot}",
                    self.positions[row], self.slots[row]
                ));
            }
        }
        Ok(())
    }

    /// Two rows that write one slot would race.
    fn validate_distinct_slots(&self) -> Result<(), ModelError> {
        let mut slots = self.slots.clone();
        slots.sort_unstable();
        match slots.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => refuse(format!("two rows write slot {}", pair[0])),
            None => Ok(()),
        }
    }
}

fn refuse<T>(reason: String) -> Result<T, ModelError> {
    Err(ModelError::Batch(reason))
}

//! The free list of a device's blocks. Pure: it exists without a device, so simulations use it too.

use keepsake_kernels::BlockId;
use parking_lot::Mutex;

/// Which blocks are free. The last one freed is the first one taken.
pub struct BlockPool {
    state: Mutex<State>,
    num_total: usize,
}

struct State {
    free: Vec<BlockId>,
    is_taken: Vec<bool>,
}

impl BlockPool {
    /// A pool with blocks `0..num_total`, all free.
    pub fn new(num_total: usize) -> Self {
        let last = u32::try_from(num_total).expect("block ids are 32 bits wide");
        let state = State { free: (0..last).rev().map(BlockId).collect(), is_taken: vec![false; num_total] };
        Self { state: Mutex::new(state), num_total }
    }

    /// Takes a free block; `None` when there is none.
    pub fn alloc(&self) -> Option<BlockId> {
        let mut state = self.state.lock();
        let block = state.free.pop()?;
        state.is_taken[block.0 as usize] = true;
        Some(block)
    }

    /// Gives a block back.
    ///
    /// # Panics
    /// When the block is free already or does not exist: two owners of one block would corrupt answers silently.
    pub fn free(&self, block: BlockId) {
        let mut state = self.state.lock();
        let is_taken = std::mem::replace(&mut state.is_taken[block.0 as usize], false);
        assert!(is_taken, "block {} freed twice", block.0);
        state.free.push(block);
    }

    pub fn num_free(&self) -> usize {
        self.state.lock().free.len()
    }

    pub fn num_total(&self) -> usize {
        self.num_total
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn blocks_come_lowest_first_and_run_out() {
        let pool = BlockPool::new(2);
        assert_eq!(pool.alloc(), Some(BlockId(0)));
        assert_eq!(pool.alloc(), Some(BlockId(1)));
        assert_eq!(pool.alloc(), None);
        pool.free(BlockId(0));
        assert_eq!(pool.alloc(), Some(BlockId(0)));
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_double_free_is_a_panic() {
        let pool = BlockPool::new(2);
        let block = pool.alloc().unwrap();
        pool.free(block);
        pool.free(block);
    }

    proptest! {
        #[test]
        fn free_and_held_always_add_up(
            num_total in 1usize..40,
            ops in prop::collection::vec(any::<(bool, prop::sample::Index)>(), 0..2_000),
        ) {
            let pool = BlockPool::new(num_total);
            let mut held: Vec<BlockId> = Vec::new();
            for (take, index) in ops {
                if take {
                    match pool.alloc() {
                        Some(block) => {
                            prop_assert!(!held.contains(&block));
                            held.push(block);
                        }
                        None => prop_assert_eq!(held.len(), num_total),
                    }
                } else if !held.is_empty() {
                    pool.free(held.swap_remove(index.index(held.len())));
                }
                prop_assert_eq!(pool.num_free() + held.len(), num_total);
            }
        }
    }
}

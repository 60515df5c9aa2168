//! Blocks of the paged KV cache: who holds which, and what is promised to whom.
//!
//! A sequence is admitted only when its worst case fits, counted as a *promise*; blocks are taken one by
//! one as it grows. Promises never exceed the pool, so a running sequence always finds its next block:
//! nothing is preempted and nothing can be stuck. Blocks carry reference counts.

/// The blocks of one sequence in order of position, and how many it may come to hold.
///
/// Must go back through `KvBlocks::release`.
#[derive(Debug)]
#[must_use]
pub struct BlockTable {
    blocks: Vec<u32>,
    promised: usize,
}

impl BlockTable {
    /// Ids of the blocks held, in order of position; an id names a block in the cache of every layer.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }
}

/// The pool of blocks.
#[derive(Debug)]
pub struct KvBlocks {
    block_size: usize,
    references: Vec<u32>,
    free: Vec<u32>,
    /// Blocks that running sequences may hold at most; those they hold are included.
    promised: usize,
}

impl KvBlocks {
    /// A pool of `blocks` blocks of `block_size` positions each.
    pub fn new(blocks: usize, block_size: usize) -> Self {
        let ids = 0..u32::try_from(blocks).expect("block ids are 32 bit on every device");
        KvBlocks { block_size, references: vec![0; blocks], free: ids.rev().collect(), promised: 0 }
    }

    /// Positions in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in the pool.
    pub fn total(&self) -> usize {
        self.references.len()
    }

    /// Blocks that hold positions now.
    pub fn used(&self) -> usize {
        self.total() - self.free.len()
    }

    /// Blocks that sequences may come to hold.
    pub fn promised(&self) -> usize {
        self.promised
    }

    /// Blocks that `positions` take.
    pub fn blocks_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.block_size)
    }

    /// Promises room for `positions`; `None` when it is not there now.
    pub fn admit(&mut self, positions: usize) -> Option<BlockTable> {
        let wanted = self.blocks_for(positions);
        if wanted > self.total() - self.promised {
            return None;
        }
        self.promised += wanted;
        Some(BlockTable { blocks: Vec::with_capacity(wanted), promised: wanted })
    }

    /// Takes blocks until `table` covers `positions`, which must be within what was promised.
    pub fn grow(&mut self, table: &mut BlockTable, positions: usize) {
        let wanted = self.blocks_for(positions);
        assert!(wanted <= table.promised, "a sequence grew past its promise");
        while table.blocks.len() < wanted {
            let block = self.free.pop().expect("promises never exceed the pool");
            self.references[block as usize] = 1;
            table.blocks.push(block);
        }
    }

    /// Ends a sequence's hold on its blocks and its promise.
    pub fn release(&mut self, table: BlockTable) {
        self.promised -= table.promised;
        for block in table.blocks {
            let references = &mut self.references[block as usize];
            *references -= 1;
            if *references == 0 {
                self.free.push(block);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    #[test]
    fn blocks_are_taken_as_the_sequence_grows() {
        let mut kv = KvBlocks::new(8, 16);
        let mut table = kv.admit(40).unwrap();
        assert_eq!((kv.used(), kv.promised()), (0, 3));
        kv.grow(&mut table, 16);
        assert_eq!(kv.used(), 1);
        kv.grow(&mut table, 17);
        assert_eq!((kv.used(), table.blocks().len()), (2, 2));
        kv.release(table);
        assert_eq!((kv.used(), kv.promised()), (0, 0));
    }

    #[test]
    fn a_worst_case_that_does_not_fit_is_not_admitted() {
        let mut kv = KvBlocks::new(4, 16);
        let first = kv.admit(33).unwrap();
        assert!(kv.admit(32).is_none());
        let second = kv.admit(16).unwrap();
        kv.release(first);
        kv.release(second);
        assert!(kv.admit(64).is_some());
    }

    #[test]
    fn random_growth_never_shares_a_block_nor_runs_out() {
        let mut rng = Rng::new(11);
        let mut kv = KvBlocks::new(37, 4);
        let mut live: Vec<(BlockTable, usize, usize)> = Vec::new();
        for _ in 0..5000 {
            match rng.below(4) {
                0 => {
                    let most = 1 + rng.below(60);
                    if let Some(table) = kv.admit(most) {
                        live.push((table, 0, most));
                    }
                }
                1 if !live.is_empty() => {
                    let (table, _, _) = live.swap_remove(rng.below(live.len()));
                    kv.release(table);
                }
                _ if !live.is_empty() => {
                    let index = rng.below(live.len());
                    let (table, at, most) = &mut live[index];
                    *at = (*at + rng.below(9)).min(*most);
                    kv.grow(table, *at);
                }
                _ => {}
            }
            let mut held: Vec<u32> =
                live.iter().flat_map(|(table, _, _)| table.blocks().to_vec()).collect();
            assert_eq!(held.len(), kv.used());
            held.sort();
            held.dedup();
            assert_eq!(held.len(), kv.used());
        }
        live.into_iter().for_each(|(table, _, _)| kv.release(table));
        assert_eq!((kv.used(), kv.promised(), kv.free.len()), (0, 0, 37));
    }
}

//! The host's tier: images that are given up to keep to a budget, and what was read again.

use amphora_hal::Backend;

use super::{AdapterPool, PoolError};
use crate::adapters::ledger::{AdapterKey, Place};
use crate::adapters::reader::{Read, Reader};

/// Adapters in host memory and behind it.
pub struct HostTier<B: Backend> {
    /// Bytes of images that are kept where their files could be read again.
    pub bytes: usize,
    /// Who reads them.
    pub reader: Reader<B>,
}

impl<B: Backend> AdapterPool<B> {
    /// Takes what was read again; gives what could not be.
    pub(super) fn finish_reads(&mut self) -> Result<Vec<(AdapterKey, String)>, PoolError> {
        let mut unreadable = Vec::new();
        while let Some(Read { key, image }) = self.reader.next() {
            match image {
                Ok(image) => {
                    if self.images.end_reading(&key, Some(image)) {
                        self.reads += 1;
                        self.ledger.warm(&key)?;
                    }
                }
                Err(reason) => {
                    self.images.end_reading(&key, None);
                    unreadable.push((key, reason));
                }
            }
        }
        Ok(unreadable)
    }

    /// Gives up images until the rest fits; not one that somebody waits for, nor one that is being copied.
    /// What cannot be read again stays, and may be more than the budget.
    pub(super) fn keep_to_budget(&mut self, wanted: &[AdapterKey]) -> Result<(), PoolError> {
        while self.images.over_budget() {
            let copying =
                |key: &AdapterKey| matches!(self.ledger.place(key), Some(Place::Loading(_)));
            let may_go = |key: &AdapterKey| !wanted.contains(key) && !copying(key);
            let Some(key) = self.images.least_wanted(may_go) else { break };
            self.images.give_up(&key);
            if self.ledger.place(&key) == Some(Place::Staged) {
                self.ledger.cool(&key)?;
            }
        }
        Ok(())
    }
}

//! From waiting to running: order of arrival, room in the cache, and adapters that are still coming.

use super::{Budget, Chunk, HeldAdapter, Scheduler, SeqSlot, Sequence};
use crate::adapters::ledger::{AdapterKey, Pin, Residency};
use crate::kv::BlockTable;
use crate::reply::{Reply, Spec};
use crate::request::{Failure, RequestId};

/// A request that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) id: RequestId,
    pub(super) spec: Spec,
    pub(super) reply: Reply,
    pub(super) pin: Option<Pin>,
    pub(super) overtaken: usize,
    /// Room set aside for a request that was passed by too often.
    pub(super) room: Option<BlockTable>,
}

impl Scheduler {
    /// Lets waiting requests run while the step, the slots and the cache have room.
    pub(super) fn admit(
        &mut self,
        residency: &dyn Fn(&AdapterKey) -> Residency,
        budget: &mut Budget,
        chunks: &mut Vec<Chunk>,
    ) {
        let mut index = 0;
        let mut draining_for_one_before = false;
        while index < self.waiting.len() && budget.tokens > 0 {
            let Some(slot) = self.slots.iter().position(Option::is_none).map(SeqSlot) else {
                break;
            };
            let waiting = &mut self.waiting[index];
            let hold = match &waiting.pin {
                None => None,
                Some(_) if draining_for_one_before => {
                    index += 1;
                    continue;
                }
                Some(pin) => match residency(&pin.key) {
                    Residency::Hot(hold) => Some(hold),
                    Residency::Absent => {
                        self.refuse(index);
                        continue;
                    }
                    Residency::Coming => {
                        if waiting.overtaken >= self.limits.max_overtakes {
                            draining_for_one_before = true;
                            let worst = waiting.spec.worst_case();
                            if waiting.room.is_none() {
                                waiting.room = self.kv.admit(worst);
                            }
                            if waiting.room.is_none() {
                                break; // first in line for blocks
                            }
                        }
                        index += 1;
                        continue;
                    }
                },
            };
            let room = waiting.room.take();
            let Some(table) = room.or_else(|| self.kv.admit(waiting.spec.worst_case())) else {
                break;
            };
            let Some(waiting) = self.waiting.remove(index) else {
                break;
            };
            for passed in self.waiting.iter_mut().take(index) {
                passed.overtaken += 1;
                draining_for_one_before |= passed.overtaken >= self.limits.max_overtakes;
            }
            let adapter = waiting.pin.zip(hold).map(|(pin, hold)| HeldAdapter { pin, hold });
            self.slots[slot.0] = Some(Sequence {
                id: waiting.id,
                spec: waiting.spec,
                table,
                adapter,
                planned: 0,
                planned_outputs: 0,
                in_flight: 0,
                reply: Some(waiting.reply),
            });
            self.order.push(slot);
            chunks.extend(self.plan(slot, budget));
        }
    }

    /// Refuses a waiting request whose adapter cannot be had.
    fn refuse(&mut self, index: usize) {
        let Some(waiting) = self.waiting.remove(index) else {
            return;
        };
        let name = waiting.pin.as_ref().map_or(String::new(), |pin| pin.key.name.to_string());
        let reply = self.forget(waiting);
        self.finished.failed += 1;
        reply.fail(Failure::AdapterUnavailable { name });
    }

    /// Gives back what a waiting request holds.
    pub(super) fn forget(&mut self, waiting: Waiting) -> Reply {
        if let Some(room) = waiting.room {
            self.kv.release(room);
        }
        waiting.reply
    }
}

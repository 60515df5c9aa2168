//! From waiting to running: order of arrival, room in the cache, and adapters that are still coming.

use super::planning::Draft;
use super::{Scheduler, SeqSlot, Sequence, State, Task};
use crate::adapters::ledger::{AdapterKey, Hold, Residency};
use crate::kv::{Admission, BlockTable, NoRoom, PendingCopy};
use crate::request::{Failure, RequestId};

/// An answer that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub task: Task,
    /// Later ones that passed it while its adapter was coming.
    pub overtaken: usize,
    /// Blocks of the prompt, all but its last token, shared with the answer that computed it.
    pub fork: Option<BlockTable>,
}

/// Blocks for all tokens of a sequence that starts.
struct Room {
    table: BlockTable,
    /// Positions in them that are computed.
    computed: usize,
    copy: Option<PendingCopy>,
}

/// What becomes of one that asks for its adapter.
enum Answer {
    /// It has it, or needs none.
    Here(Option<Hold>),
    Coming,
    /// There is none of that name.
    Absent(String),
}

impl Scheduler {
    /// Lets waiting requests run while the step, the slots and the cache have room.
    pub(super) fn admit(
        &mut self,
        residency: &dyn Fn(&AdapterKey) -> Residency,
        draft: &mut Draft,
    ) {
        let mut index = 0;
        let mut draining_for_one_before = false;
        while index < self.waiting.len() && draft.tokens > 0 {
            let Some(slot) = self.slots.iter().position(Option::is_none).map(SeqSlot) else {
                break;
            };
            let waiting = &self.waiting[index];
            let hold = match &waiting.task.pin {
                None => Answer::Here(None),
                Some(_) if draining_for_one_before => Answer::Coming,
                Some(pin) => match residency(&pin.key) {
                    Residency::Hot(hold) => Answer::Here(Some(hold)),
                    Residency::Absent => Answer::Absent(pin.key.name.to_string()),
                    Residency::Coming => {
                        draining_for_one_before = waiting.overtaken >= self.limits.max_overtakes;
                        Answer::Coming
                    }
                },
            };
            let hold = match hold {
                Answer::Here(hold) => hold,
                Answer::Coming => {
                    index += 1;
                    continue;
                }
                Answer::Absent(name) => {
                    let id = waiting.task.id;
                    self.fail_waiting(id, &Failure::AdapterUnavailable { name });
                    continue;
                }
            };
            // First in line for blocks: nobody passes one who has its adapter and no room.
            let Some(room) = self.room(index) else { break };
            let Some(Waiting { task, .. }) = self.waiting.remove(index) else { break };
            for passed in self.waiting.iter_mut().take(index) {
                passed.overtaken += 1;
                draining_for_one_before |= passed.overtaken >= self.limits.max_overtakes;
            }
            self.start(slot, task, hold, room);
            self.plan(slot, draft);
        }
    }

    /// Blocks for all tokens of one that waits. One block is left for each sequence that runs, so that those
    /// here do not lose theirs at once.
    fn room(&mut self, index: usize) -> Option<Room> {
        loop {
            let spare = self.running().filter(|(_, sequence)| sequence.runs()).count();
            let waiting = &mut self.waiting[index];
            let task = &waiting.task;
            let room = match waiting.fork.take() {
                Some(mut table) => {
                    let tokens = task.tokens.len();
                    match self.kv.own(&mut table, (tokens - 1, tokens), spare) {
                        Ok(copy) => Some(Room { table, computed: tokens - 1, copy }),
                        Err(NoRoom) => {
                            waiting.fork = Some(table);
                            None
                        }
                    }
                }
                None => {
                    let admitted = self.kv.admit(Admission {
                        generation: task.generation(),
                        tokens: &task.tokens,
                        skippable: task.skippable(),
                        spare,
                    });
                    admitted.map(|(table, computed)| Room { table, computed, copy: None })
                }
            };
            // Where nothing runs, nothing but shares that wait can be in the way.
            if room.is_some() || spare > 0 || !self.drop_a_share() {
                return room;
            }
        }
    }

    /// Gives up the shared blocks of the last answer that waits with some; it computes its prompt itself,
    /// or finds it in the cache. Whether there was one.
    pub(super) fn drop_a_share(&mut self) -> bool {
        let share = self.waiting.iter_mut().rev().find_map(|waiting| waiting.fork.take());
        share.map(|table| self.kv.release(table)).is_some()
    }

    fn start(&mut self, slot: SeqSlot, mut task: Task, hold: Option<Hold>, room: Room) {
        let Room { table, computed, copy } = room;
        if task.ticket.choice == 0
            && !std::mem::replace(&mut task.ran, true)
            && let Some(reply) = &mut task.reply
        {
            reply.note_cached(computed);
        }
        let ticket = task.ticket;
        self.slots[slot.0] = Some(Sequence {
            fed: task.tokens.len(),
            planned: computed,
            planned_outputs: task.drawn(),
            task,
            table,
            hold,
            copy,
            in_flight: 0,
            state: State::Runs,
        });
        let before = |other: &SeqSlot| self.ticket(*other).is_some_and(|other| other < ticket);
        let at = self.order.partition_point(before);
        self.order.insert(at, slot);
    }

    /// Fails the requests that wait for a version that cannot be read again.
    pub fn refuse(&mut self, key: &AdapterKey, reason: &str) {
        let waits = |waiting: &&Waiting| waiting.task.pin.as_ref().is_some_and(|p| p.key == *key);
        let ids: Vec<RequestId> =
            self.waiting.iter().filter(waits).map(|waiting| waiting.task.id).collect();
        let (name, reason) = (key.name.to_string(), reason.to_owned());
        let failure = Failure::AdapterUnreadable { name, reason };
        ids.into_iter().for_each(|id| self.fail_waiting(id, &failure));
    }

    /// Fails a request that waits.
    fn fail_waiting(&mut self, id: RequestId, failure: &Failure) {
        for mut task in self.take_waiting(id) {
            self.fail(&mut task, failure);
        }
    }

    /// Puts an answer among those that wait, by its arrival.
    pub(super) fn enqueue(&mut self, waiting: Waiting) {
        let ticket = waiting.task.ticket;
        let at = self.waiting.partition_point(|other| other.task.ticket < ticket);
        self.waiting.insert(at, waiting);
    }

    /// Takes all waiting answers of a request out, with what they hold given back.
    pub(super) fn take_waiting(&mut self, id: RequestId) -> Vec<Task> {
        let mut taken = Vec::new();
        let mut index = 0;
        while index < self.waiting.len() {
            if self.waiting[index].task.id == id
                && let Some(waiting) = self.waiting.remove(index)
            {
                if let Some(share) = waiting.fork {
                    self.kv.release(share);
                }
                taken.push(waiting.task);
            } else {
                index += 1;
            }
        }
        taken
    }
}

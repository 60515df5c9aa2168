//! The engine's thread: one loop that owns everything it touches.

mod budget;
mod inbox;
mod link;
mod no_room;
mod report;
mod start;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};

use amphora_hal::{Backend, Slot};

use crate::adapters::ledger::Residency;
use crate::adapters::pool::{AdapterPool, Demand, Polled, PoolError};
use crate::config::LookAhead;
use crate::executor::{Executor, Running, STEPS_IN_FLIGHT};
use crate::handle::{Command, Shared, Shutdown};
use crate::metrics::StepReport;
use crate::plan::Planner;
use crate::request::Failure;
use crate::scheduler::{Batch, Scheduler};
pub use budget::{Budget, budget};
use inbox::Message;
pub use no_room::NoRoom;
pub use start::{EngineError, EngineThread, ModelSource, StartReport, Started, arena_pages, start};

/// Whether a turn found something to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Worked,
    Idle,
}

struct Engine<B: Backend> {
    // In front, so that steps in flight end before what they use.
    in_flight: VecDeque<(Batch, Running<B>)>,
    adapters: Option<AdapterPool<B>>,
    executor: Executor<B>,
    scheduler: Scheduler,
    planner: Planner,
    inbox: Receiver<Message<B>>,
    shared: Arc<Shared>,
    stopping: Option<Shutdown>,
    /// Who waits for the next snapshot.
    settling: Vec<SyncSender<()>>,
    look_ahead: LookAhead,
    /// Answers of requests that failed before the scheduler saw them.
    refused: u64,
    most_mixed: StepReport,
    /// The revision of the list of adapters that was left behind last.
    published: u64,
}

impl<B: Backend> Engine<B> {
    /// Runs until it is told to stop and has answered, until nobody has a handle, or until the device
    /// fails. On each way out every request gets its end.
    fn run(mut self) -> Result<(), PoolError> {
        let result = self.turns();
        self.shared.closed.store(true, Ordering::Release);
        let failure = match &result {
            Ok(()) => Failure::Stopped,
            Err(error) => Failure::Device(error.to_string()),
        };
        self.scheduler.fail_all(&failure);
        while let Ok(message) = self.inbox.try_recv() {
            if let Message::Command(Command::Submit(submission)) = message {
                submission.fail(&failure);
            }
        }
        self.publish();
        result
    }

    fn turns(&mut self) -> Result<(), PoolError> {
        let mut last = Turn::Worked;
        loop {
            self.drain_inbox(last);
            match self.stopping {
                Some(Shutdown::Now) => return Ok(()),
                Some(Shutdown::Drain) if self.scheduler.is_idle() && self.in_flight.is_empty() => {
                    return Ok(());
                }
                _ => last = self.turn()?,
            }
            self.publish();
            for answer in self.settling.drain(..) {
                // The caller may have given up waiting.
                let _ = answer.send(());
            }
        }
    }

    /// One turn: commit what is done, look after adapters, plan, execute. With nothing to plan it waits
    /// for the step in flight.
    fn turn(&mut self) -> Result<Turn, PoolError> {
        let mut turn = Turn::Idle;
        while let Some((_, front)) = self.in_flight.front()
            && (self.in_flight.len() >= STEPS_IN_FLIGHT
                || (self.look_ahead == LookAhead::WhileBusy && front.is_done()?))
        {
            self.commit_oldest()?;
            turn = Turn::Worked;
        }
        self.poll_adapters()?;
        if let Some(batch) = self.schedule() {
            self.execute(batch)?;
            turn = Turn::Worked;
        } else if !self.in_flight.is_empty() {
            self.commit_oldest()?;
            turn = Turn::Worked;
        }
        Ok(turn)
    }

    fn schedule(&mut self) -> Option<Batch> {
        match &self.adapters {
            Some(pool) => self.scheduler.schedule(&|key| pool.residency(key)),
            None => self.scheduler.schedule(&|_| Residency::Absent),
        }
    }

    fn execute(&mut self, batch: Batch) -> Result<(), PoolError> {
        let slots: BTreeSet<Slot> = batch.chunks.iter().filter_map(|chunk| chunk.adapter).collect();
        if let Some(pool) = &mut self.adapters {
            slots.iter().for_each(|&slot| pool.used(slot, batch.step));
        }
        let plan = self.planner.build(&batch, &self.scheduler)?;
        let table = self.adapters.as_ref().map(AdapterPool::table);
        let running = self.executor.execute(plan, table)?;
        self.note_mix(&batch, running.plan(), &slots);
        self.in_flight.push_back((batch, running));
        Ok(())
    }

    fn commit_oldest(&mut self) -> Result<(), PoolError> {
        let Some((batch, running)) = self.in_flight.pop_front() else { return Ok(()) };
        let results = self.executor.finish(running, &batch.chunks)?;
        self.scheduler.commit(&batch, results);
        Ok(())
    }

    fn poll_adapters(&mut self) -> Result<(), PoolError> {
        let Some(pool) = &mut self.adapters else { return Ok(()) };
        let wanted = self.scheduler.wanted_adapters();
        let completed = self.scheduler.last_committed();
        let demand = Demand { wanted: &wanted, completed };
        let Polled { over, unreadable } = pool.poll(self.executor.compute(), demand)?;
        over.iter().for_each(|key| self.scheduler.forget(key));
        unreadable.into_iter().for_each(|(key, reason)| self.scheduler.refuse(&key, &reason));
        Ok(())
    }
}

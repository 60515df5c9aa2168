//! Sharing one operator's outputs among threads. Who computes an output never changes its bits.

use std::sync::{Mutex, PoisonError};

use amphora_hal::{Error, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Multiply-adds below which waking another thread costs more than it saves.
const WORTH_SHARING: usize = 1_000_000;

/// The calling thread and its helpers.
#[derive(Debug)]
pub(crate) struct Threads {
    helpers: Option<ThreadPool>,
    count: usize,
}

impl Threads {
    /// `count` threads in all, the caller included.
    pub(crate) fn new(count: usize) -> Result<Self> {
        let count = count.max(1);
        let helpers = (count > 1)
            .then(|| {
                ThreadPoolBuilder::new()
                    .num_threads(count - 1)
                    .thread_name(|i| format!("amphora-cpu-{i}"))
                    .build()
            })
            .transpose()
            .map_err(|error| Error::Driver {
                call: "ThreadPoolBuilder::build",
                code: 0,
                message: error.to_string(),
            })?;
        Ok(Threads { helpers, count })
    }

    /// How many parts work of so many multiply-adds is worth cutting into.
    pub(crate) fn parts(&self, multiply_adds: usize) -> usize {
        self.count.min(multiply_adds / WORTH_SHARING).max(1)
    }

    /// Runs every task; the caller takes part.
    pub(crate) fn run<T: Send>(&self, tasks: Vec<T>, body: impl Fn(T) + Sync) {
        let states = vec![(); self.count.min(tasks.len())];
        self.run_with(states, tasks, |(), task| body(task));
    }

    /// Runs every task, each with one of `states`, which a thread has for itself: one thread for each of
    /// them at most. The caller takes part.
    ///
    /// # Panics
    /// There are tasks and no state.
    pub(crate) fn run_with<S: Send, T: Send>(
        &self,
        states: Vec<S>,
        tasks: Vec<T>,
        body: impl Fn(&mut S, T) + Sync,
    ) {
        assert!(tasks.is_empty() || !states.is_empty(), "work needs a state to be done with");
        // No helper is woken for nothing.
        let wanted = self.count.min(tasks.len()).min(states.len());
        let mut states = states.into_iter();
        let Some(helpers) = self.helpers.as_ref().filter(|_| wanted > 1) else {
            let Some(mut state) = states.next() else { return };
            return tasks.into_iter().for_each(|task| body(&mut state, task));
        };
        let queue = Mutex::new(tasks.into_iter());
        let work = |mut state: S| {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(task) = next else { break };
                body(&mut state, task);
            }
        };
        let work = &work;
        let own = states.next();
        helpers.in_place_scope(|scope| {
            for state in states.take(wanted - 1) {
                scope.spawn(move |_| work(state));
            }
            own.map(work);
        });
    }
}

/// Cuts `0..len` into at most `parts` ranges of equal size, each a multiple of `grain` but the last.
pub(crate) fn ranges(len: usize, parts: usize, grain: usize) -> Vec<std::ops::Range<usize>> {
    let step = len.div_ceil(parts.max(1)).next_multiple_of(grain).max(grain);
    (0..len).step_by(step).map(|start| start..(start + step).min(len)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for count in [1, 2, 5] {
            let threads = Threads::new(count).expect("threads");
            let sum = std::sync::atomic::AtomicUsize::new(0);
            threads.run((1..=100).collect(), |n: usize| {
                sum.fetch_add(n, std::sync::atomic::Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 5050);
            let (mut left, mut right) = (0, 0);
            threads.run_with(vec![&mut left, &mut right], (1..=100).collect(), |sum, n: usize| {
                **sum += n;
            });
            assert_eq!(left + right, 5050);
        }
    }

    #[test]
    fn ranges_cover_once_at_the_grain() {
        assert_eq!(ranges(40, 2, 16), [0..32, 32..40]);
        assert_eq!(ranges(5, 8, 16), vec![0..5]);
        assert!(ranges(0, 3, 16).is_empty());
    }
}

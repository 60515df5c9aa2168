//! What the rest of a server holds of an engine: a handle that any thread may use.
//!
//! Commands go through an inbox to the engine's thread; the lists and numbers that change with every
//! step are read from a snapshot the engine leaves behind, so that nobody waits for a step to end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use amphora_model::adapter::{AdapterFactors, AdapterRefused};
use amphora_model::source::Source;

use crate::adapters::ledger::{AdapterKey, AdapterLine, AdapterStatus, LedgerError};
use crate::adapters::name::{NameError, check_name};
use crate::adapters::pages::PagesError;
use crate::metrics::Metrics;
use crate::profiling::{Profiler, Profiling, StepProfile};
use crate::reply::{Reply, Spec, split};
use crate::request::{Failure, Request, RequestError, RequestId, RequestLimits};

/// Why a request was not taken. Its sink is not called.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// It breaks a rule.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The engine takes no more requests.
    #[error("the engine has stopped")]
    Stopped,
}

/// Why an adapter was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The engine runs without adapters.
    #[error("the engine was started without adapters")]
    Off,
    /// It cannot be called that.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The files are refused.
    #[error(transparent)]
    Refused(#[from] AdapterRefused),
    /// It has no device form.
    #[error("adapter `{name}` cannot be packed: {reason}")]
    Pack {
        /// Its name.
        name: String,
        /// The device's reason.
        reason: amphora_hal::Error,
    },
    /// It is larger than the adapter memory.
    #[error("adapter `{name}` does not fit: {reason}")]
    DoesNotFit {
        /// Its name.
        name: String,
        /// What is missing.
        reason: PagesError,
    },
    /// The engine takes no more commands.
    #[error("the engine has stopped")]
    Stopped,
}

/// An adapter that was loaded from files.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The version that requests for its name get from now on.
    pub key: AdapterKey,
    /// What was assumed where its files leave a choice, for the operator.
    pub notes: Vec<String>,
}

/// Why an adapter was not unloaded.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum UnloadError {
    /// There is no such adapter.
    #[error("there is no adapter `{0}`")]
    Unknown(String),
    /// The engine takes no more commands.
    #[error("the engine has stopped")]
    Stopped,
}

/// How an engine stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shutdown {
    /// Answers what was taken, takes nothing new.
    Drain,
    /// Fails what is not answered yet.
    Now,
}

/// A request on its way to the engine's thread.
#[derive(Debug)]
pub(crate) struct Submission {
    pub id: RequestId,
    pub adapter: Option<String>,
    pub spec: Spec,
    pub replies: Vec<Reply>,
}

impl Submission {
    /// Tells the client that there is no answer.
    pub fn fail(self, failure: &Failure) {
        self.replies.into_iter().for_each(|reply| reply.fail(failure.clone()));
    }
}

/// A command to the engine's thread.
#[derive(Debug)]
pub(crate) enum Command {
    Submit(Box<Submission>),
    Cancel(RequestId),
    Unload { name: String, answer: SyncSender<Result<(), LedgerError>> },
    Settle { answer: SyncSender<()> },
    Profile(Profiler),
    Shutdown(Shutdown),
}

/// What readers see of the engine.
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot {
    pub metrics: Metrics,
    /// By name.
    pub adapters: Vec<AdapterLine>,
}

/// State that handles and engine share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub snapshot: Mutex<Snapshot>,
    pub closed: AtomicBool,
    pub next_id: AtomicU64,
    /// Seeds of requests without one follow from it and their ids.
    pub seed: u64,
    pub limits: RequestLimits,
}

impl Shared {
    /// The snapshot; a thread that died while it held the lock left whole values behind.
    pub fn snapshot(&self) -> std::sync::MutexGuard<'_, Snapshot> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The parts of a handle that know the device's type, behind a trait that does not.
pub(crate) trait Link: Send + Sync {
    /// Gives the command back when the engine is gone.
    fn send(&self, command: Command) -> Result<(), Command>;
    /// Packs on the calling thread and hands the image over; `source` is where it can be read again.
    fn load(
        &self,
        name: &str,
        factors: &AdapterFactors,
        source: Option<&Source>,
    ) -> Result<AdapterKey, LoadError>;
    /// Reads and checks on the calling thread.
    fn read(&self, source: &Source) -> Result<AdapterFactors, LoadError>;
}

/// A running engine, as others see it.
#[derive(Clone)]
pub struct EngineHandle {
    pub(crate) link: Arc<dyn Link>,
    pub(crate) shared: Arc<Shared>,
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

impl EngineHandle {
    /// Takes a request. Events come through its sink from the engine's thread; whether its adapter
    /// exists is decided there and told by the first event.
    ///
    /// # Errors
    /// It breaks a rule, or the engine is stopping.
    pub fn submit(&self, request: Request) -> Result<RequestId, SubmitError> {
        self.shared.limits.check(&request)?;
        if self.shared.closed.load(Ordering::Acquire) {
            return Err(SubmitError::Stopped);
        }
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let adapter = request.adapter.clone();
        let (spec, replies) = split(request, self.shared.seed.wrapping_add(id.0));
        let submission = Submission { id, adapter, spec, replies };
        match self.link.send(Command::Submit(Box::new(submission))) {
            Ok(()) => Ok(id),
            Err(command) => {
                if let Command::Submit(submission) = command {
                    submission.replies.into_iter().for_each(Reply::discard);
                }
                Err(SubmitError::Stopped)
            }
        }
    }

    /// Ends a request early; it gets `Finished(Cancelled)`. One that is over is left as it is.
    pub fn cancel(&self, id: RequestId) {
        // A stopped engine has told every client the end already.
        let _ = self.link.send(Command::Cancel(id));
    }

    /// Reads, checks and packs an adapter on the calling thread, and makes it known under `name`. A
    /// version that had the name drains. The files must stay as they are: they may be read again, and
    /// requests fail if they then hold something else.
    ///
    /// # Errors
    /// It is refused; nothing changes then.
    pub fn load_adapter(&self, name: &str, source: &Source) -> Result<Loaded, LoadError> {
        check_name(name)?;
        let factors = self.link.read(source)?;
        let key = self.link.load(name, &factors, Some(source))?;
        Ok(Loaded { key, notes: factors.notes })
    }

    /// The same for factors that are in memory.
    ///
    /// # Errors
    /// It is refused; nothing changes then.
    pub fn load_factors(
        &self,
        name: &str,
        factors: &AdapterFactors,
    ) -> Result<AdapterKey, LoadError> {
        check_name(name)?;
        self.link.load(name, factors, None)
    }

    /// Takes an adapter out of the names at once. Requests that have it are answered; its memory is
    /// freed with the last of them.
    ///
    /// # Errors
    /// There is no such name.
    pub fn unload_adapter(&self, name: &str) -> Result<(), UnloadError> {
        let (answer, answered): (_, Receiver<_>) = sync_channel(1);
        let unload = Command::Unload { name: name.to_owned(), answer };
        self.link.send(unload).map_err(|_| UnloadError::Stopped)?;
        match answered.recv() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(UnloadError::Unknown(name.to_owned())),
            Err(_) => Err(UnloadError::Stopped),
        }
    }

    /// Waits until the engine has done all that was sent before, and what `metrics` and `adapters` say is
    /// not older than that. They are otherwise behind by the step at hand.
    pub fn settle(&self) {
        let (answer, answered) = sync_channel(1);
        if self.link.send(Command::Settle { answer }).is_ok() {
            // A stopped engine has left its last word already.
            let _ = answered.recv();
        }
    }

    /// Times every step from here on, for as long as the receiver is kept. Such a step waits for its own
    /// end, and gives the answers that it gives otherwise. A device that tells no times fails the step.
    pub fn profile(&self, how: Profiling) -> Receiver<StepProfile> {
        let (listener, profiles) = channel();
        // A stopped engine takes no steps: the receiver says so.
        let _ = self.link.send(Command::Profile(Profiler { how, listener }));
        profiles
    }

    /// All adapters, those that drain included.
    pub fn adapters(&self) -> Vec<AdapterStatus> {
        self.shared.snapshot().adapters.iter().map(AdapterLine::status).collect()
    }

    /// Whether a new request for `name` would find its adapter.
    pub fn has_adapter(&self, name: &str) -> bool {
        let snapshot = self.shared.snapshot();
        let first = snapshot.adapters.partition_point(|line| line.name() < name);
        let versions = snapshot.adapters[first..].iter().take_while(|line| line.name() == name);
        versions.into_iter().any(AdapterLine::is_named)
    }

    /// What the engine counted.
    pub fn metrics(&self) -> Metrics {
        self.shared.snapshot().metrics.clone()
    }

    /// The bounds that requests are held against.
    pub fn limits(&self) -> &RequestLimits {
        &self.shared.limits
    }

    /// Stops the engine. Every request that was taken still gets its end.
    pub fn shutdown(&self, how: Shutdown) {
        self.shared.closed.store(true, Ordering::Release);
        // One that has stopped needs no command.
        let _ = self.link.send(Command::Shutdown(how));
    }
}

//! Messages to the engine's thread.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, TryRecvError};
use std::time::Duration;

use amphora_hal::Backend;
use amphora_model::adapter_image::AdapterImage;

use super::{Engine, Turn};
use crate::adapters::ledger::{AdapterKey, LedgerError};
use crate::adapters::pages::PagesError;
use crate::adapters::pool::AdapterPool;
use crate::adapters::reader::Origin;
use crate::handle::{Command, Shutdown, Submission};
use crate::request::{Event, RequestError};

/// How long the loop sleeps when only a copy is under way; a copy of an adapter takes longer.
const COPY_POLL: Duration = Duration::from_micros(200);

/// What comes through the inbox.
pub(crate) enum Message<B: Backend> {
    Command(Command),
    Stage {
        name: String,
        image: AdapterImage<B>,
        origin: Option<Origin>,
        answer: SyncSender<Result<AdapterKey, PagesError>>,
    },
}

impl<B: Backend> Engine<B> {
    /// Takes all messages. Sleeps for the next one when the last turn found nothing to do; not for long
    /// while a copy is under way, which sends no message.
    pub(super) fn drain_inbox(&mut self, last: Turn) {
        if last == Turn::Idle {
            let copying = self.adapters.as_ref().is_some_and(AdapterPool::is_busy);
            let message = match copying || !self.scheduler.is_idle() {
                true => self.inbox.recv_timeout(COPY_POLL),
                false => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match message {
                Ok(message) => self.take(message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.stopping = Some(Shutdown::Drain),
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(message) => self.take(message),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.stopping.get_or_insert(Shutdown::Drain);
                    break;
                }
            }
        }
    }

    fn take(&mut self, message: Message<B>) {
        match message {
            Message::Command(Command::Submit(submission)) => self.accept(*submission),
            Message::Command(Command::Cancel(id)) => self.scheduler.cancel(id),
            Message::Command(Command::Unload { name, answer }) => {
                let result = match &mut self.adapters {
                    Some(pool) => pool.retire(&name).map(drop),
                    None => Err(LedgerError::Unknown(name)),
                };
                self.publish();
                // The caller may have given up waiting.
                let _ = answer.send(result);
            }
            Message::Command(Command::Settle { answer }) => self.settling.push(answer),
            Message::Command(Command::Profile(profiler)) => self.executor.profile(profiler),
            Message::Command(Command::Shutdown(how)) => self.stopping = Some(how),
            Message::Stage { name, image, origin, answer } => {
                let Some(pool) = &mut self.adapters else { return };
                let result = pool.stage(&name, image, origin);
                self.publish();
                // The caller may have given up waiting.
                let _ = answer.send(result);
            }
        }
    }

    /// Pins the adapter of a request and lets it wait for its turn.
    fn accept(&mut self, submission: Submission) {
        let pin = match &submission.adapter {
            None => None,
            Some(name) => match self.adapters.as_ref().map(|pool| pool.pin(name)) {
                Some(Ok(pin)) => Some(pin),
                _ => {
                    self.refused += submission.replies.len() as u64;
                    let unknown = RequestError::UnknownAdapter(name.clone());
                    return submission.fail(&unknown.into());
                }
            },
        };
        let adapter = pin.as_ref().map(|pin| pin.key.clone());
        let Submission { id, spec, mut replies, .. } = submission;
        // One who is gone already is noticed again at the first token.
        if let Some(reply) = replies.first_mut() {
            let _ = reply.send(Event::Started { adapter });
        }
        self.scheduler.submit(id, spec, replies, pin);
    }
}

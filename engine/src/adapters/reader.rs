//! The thread that reads adapters again whose images were given up.
//!
//! It never waits for the engine, nor the engine for it: jobs go one way, images come back the other, and
//! the pool looks for them each turn. What it reads must be what was loaded: another digest is an error, so
//! a request never gets half a file, nor a version that it did not ask for.

use std::collections::VecDeque;
use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use amphora_hal::{Backend, HostBytes};
use amphora_model::adapter_image::AdapterImage;
use amphora_model::source::Source;

use super::ledger::AdapterKey;

/// Where an adapter's files are, and what was in them when it was loaded.
#[derive(Debug, Clone)]
pub struct Origin {
    /// The files.
    pub source: Source,
    /// Of the image that was made of them.
    pub digest: Digest,
}

/// 64 bits that two images share by chance alone: SipHash of everything that reaches the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest(u64);

impl Digest {
    /// That of an image whose pages are all there.
    pub fn of<B: Backend>(image: &AdapterImage<B>) -> Self {
        let mut hash = DefaultHasher::new();
        for block in &image.blocks {
            hash.write_usize(block.bytes);
            let page = image.pages[block.page].bytes();
            hash.write(&page[block.offset..block.offset + block.bytes]);
        }
        for row in &image.rows {
            for number in [row.row, row.a, row.b, row.class.get()] {
                hash.write_usize(number);
            }
            hash.write_u32(row.scale.to_bits());
        }
        Digest(hash.finish())
    }
}

/// An adapter to be read again.
struct Job {
    key: AdapterKey,
    origin: Origin,
}

/// What became of it: its image, or why there is none.
pub(super) struct Read<B: Backend> {
    pub key: AdapterKey,
    pub image: Result<AdapterImage<B>, String>,
}

/// Makes an image of files, or says why that is not possible.
pub type ReadImage<B> = Box<dyn Fn(&Source) -> Result<AdapterImage<B>, String> + Send>;

/// The thread, as the pool has it.
pub struct Reader<B: Backend> {
    /// `None` only while it is dropped.
    jobs: Option<Sender<Job>>,
    done: Receiver<Read<B>>,
    thread: Option<JoinHandle<()>>,
    /// What is not read yet, in the order of the jobs.
    open: VecDeque<AdapterKey>,
}

impl<B: Backend> Reader<B> {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gives none.
    pub fn start(read: ReadImage<B>) -> std::io::Result<Self> {
        let (jobs, inbox) = channel::<Job>();
        let (outbox, done) = channel();
        let body = move || {
            for Job { key, origin } in inbox {
                let image = read(&origin.source).and_then(|image| {
                    match Digest::of(&image) == origin.digest {
                        true => Ok(image),
                        false => {
                            Err(format!("{} has changed since it was loaded", origin.source.name()))
                        }
                    }
                });
                if outbox.send(Read { key, image }).is_err() {
                    return; // the pool is gone
                }
            }
        };
        let thread = std::thread::Builder::new().name("adapter-reader".into()).spawn(body)?;
        Ok(Reader { jobs: Some(jobs), done, thread: Some(thread), open: VecDeque::new() })
    }

    /// Whether something is being read.
    pub(super) fn is_busy(&self) -> bool {
        !self.open.is_empty()
    }

    /// Has an adapter read.
    pub(super) fn read(&mut self, key: &AdapterKey, origin: &Origin) {
        let job = Job { key: key.clone(), origin: origin.clone() };
        // One that cannot be sent is told as one that could not be read.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
        self.open.push_back(key.clone());
    }

    /// The next one that is done, if there is one.
    pub(super) fn next(&mut self) -> Option<Read<B>> {
        match self.done.try_recv() {
            Ok(read) => {
                self.open.pop_front();
                Some(read)
            }
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                let image = Err("the thread that reads adapters has ended".to_owned());
                self.open.pop_front().map(|key| Read { key, image })
            }
        }
    }
}

impl<B: Backend> Drop for Reader<B> {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been told on its own thread; nothing here depends on it.
            let _ = thread.join();
        }
    }
}

//! Points in a stream.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use amphora_hal::Result;

use super::{Context, acl};
use crate::sys;

/// Handles of events that have passed, to be recorded again: a step then creates none.
#[derive(Debug, Default)]
pub(crate) struct EventPool(Mutex<Vec<usize>>);

/// An event that was recorded once. Clones are the same event.
#[derive(Debug, Clone)]
pub struct Event(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Context,
    pool: Arc<EventPool>,
    handle: usize,
    /// Seen to have passed.
    done: AtomicBool,
    /// A stream was told to wait for it: another record could then move what it waits for.
    waited: AtomicBool,
}

impl Event {
    /// Records a fresh event behind everything on `stream`.
    pub(super) fn record(context: &Context, pool: &Arc<EventPool>, stream: usize) -> Result<Self> {
        let api = context.enter()?;
        let reused = pool.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let handle = match reused {
            Some(handle) => handle,
            None => {
                let mut handle = std::ptr::null_mut();
                let flag = sys::ACL_EVENT_SYNC as u32;
                // SAFETY: `handle` is valid for the write.
                unsafe { acl!(api, aclrtCreateEventExWithFlag(&raw mut handle, flag)) }?;
                handle as usize
            }
        };
        let event = Event(Arc::new(Inner {
            context: context.clone(),
            pool: pool.clone(),
            handle,
            done: AtomicBool::new(false),
            waited: AtomicBool::new(false),
        }));
        // SAFETY: the event is ours alone, and the caller's stream is alive.
        unsafe { acl!(api, aclrtRecordEvent(handle as _, stream as _)) }?;
        Ok(event)
    }

    /// Whether it has passed; asks, never waits.
    pub(crate) fn is_done(&self) -> Result<bool> {
        if self.0.done.load(Ordering::Acquire) {
            return Ok(true);
        }
        let api = self.0.context.enter()?;
        let mut status = sys::ACL_EVENT_RECORDED_STATUS_NOT_READY;
        // SAFETY: the event lives as long as `self`, `status` is valid for the write.
        unsafe { acl!(api, aclrtQueryEventStatus(self.0.handle as _, &raw mut status)) }?;
        let done = status == sys::ACL_EVENT_RECORDED_STATUS_COMPLETE;
        if done {
            self.0.done.store(true, Ordering::Release);
        }
        Ok(done)
    }

    /// Waits until it has passed.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let api = self.0.context.enter()?;
        // SAFETY: the event lives as long as `self`.
        unsafe { acl!(api, aclrtSynchronizeEvent(self.0.handle as _)) }?;
        self.0.done.store(true, Ordering::Release);
        Ok(())
    }

    pub(super) fn handle_for_wait(&self) -> usize {
        self.0.waited.store(true, Ordering::Release);
        self.0.handle
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if *self.done.get_mut() && !*self.waited.get_mut() {
            let mut pool = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
            pool.push(self.handle);
        } else if let Ok(api) = self.context.enter() {
            // SAFETY: nobody else has the handle: streams that wait for it keep a clone (see
            // `Stream::wait`) until they are past the wait.
            let _ = unsafe { acl!(api, aclrtDestroyEvent(self.handle as _)) };
        }
    }
}

impl EventPool {
    /// Frees the pooled events, before their context goes.
    pub(crate) fn clear(&self, context: &Context) {
        let handles = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for handle in handles {
            if let Ok(api) = context.enter() {
                // SAFETY: a pooled handle has no other owner.
                let _ = unsafe { acl!(api, aclrtDestroyEvent(handle as _)) };
            }
        }
    }
}

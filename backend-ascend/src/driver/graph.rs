//! Recorded stretches of a stream.

use std::sync::Arc;

use super::{Buffer, Context, acl};

/// A recorded model.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    model: usize,
    /// The workspace that its operators use; it must not go before the graph.
    _workspace: Option<Arc<Buffer>>,
}

impl Graph {
    pub(super) fn new(context: &Context, model: usize, workspace: Option<Arc<Buffer>>) -> Self {
        Graph { context: context.clone(), model, _workspace: workspace }
    }

    pub(super) fn model(&self) -> usize {
        self.model
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // A model that still runs must not be destroyed. Errors have no one left to go to.
        let _ = self.context.synchronize();
        if let Ok(api) = self.context.enter() {
            // SAFETY: the model is ours and idle.
            let _ = unsafe { acl!(api, aclmdlRIDestroy(self.model as _)) };
        }
    }
}

//! From the engine's events to a response, whole or streamed.
//!
//! The engine's thread calls a sink for each event; the sink puts it into a channel and never
//! blocks. When the client goes away its response is dropped, the channel closes, the next event
//! finds nobody ([`Delivery::Gone`]), and [`Cancel`] tells the engine even when no event comes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use amphora_engine::{self as engine, Delivery, Event, Failure, FinishReason, RequestId};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::App;
use crate::openai::{ApiError, Choice, Chunks, Envelope, Shared, Usage, whole};
use crate::service::{Ask, Service, api_error, submit_error};

/// An event and the choice it belongs to.
type Tagged = (usize, Event);

/// Puts all prompts to the engine, each as one choice, and answers as `shared` wants it.
pub async fn answer(
    app: &App,
    envelope: Envelope,
    shared: &Shared,
    asks: Vec<Ask>,
) -> Result<Response, ApiError> {
    let places = app.places.take(asks.len())?;
    let mut events = Events::submit(&app.service, asks, places)?;
    // A request that cannot be served fails before anything is sent, so it has a status of its own.
    events.accepted().await?;
    if shared.stream {
        let chunks = Chunks { envelope, include_usage: shared.include_usage };
        let headers =
            [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        return Ok((headers, Body::from_stream(Streamed::new(chunks, events))).into_response());
    }
    let (choices, usage) = events.collect().await?;
    Ok(Json(whole(&envelope, &choices, usage)).into_response())
}

/// Cancels its requests when it is dropped; those that have ended do not mind.
struct Cancel {
    ids: Vec<RequestId>,
    call: Box<dyn Fn(RequestId) + Send>,
}

impl Drop for Cancel {
    fn drop(&mut self) {
        for id in &self.ids {
            (self.call)(*id);
        }
    }
}

/// The events of one or more choices, in the order in which they happen.
struct Events {
    receiver: UnboundedReceiver<Tagged>,
    /// Events read before the response began.
    early: VecDeque<Tagged>,
    /// Choices that have not ended.
    open: usize,
    choices: usize,
    usage: Usage,
    cancel: Cancel,
    /// Given back when the answer is out or its client gone.
    places: Option<OwnedSemaphorePermit>,
}

impl Events {
    /// Puts all prompts to the engine; when one is refused, those before it are cancelled.
    fn submit(
        service: &Service,
        asks: Vec<Ask>,
        places: OwnedSemaphorePermit,
    ) -> Result<Self, ApiError> {
        let (sender, receiver) = unbounded_channel();
        let handle = service.engine.clone();
        let mut events = Self::new(
            receiver,
            Cancel { ids: Vec::new(), call: Box::new(move |id| handle.cancel(id)) },
        );
        events.places = Some(places);
        for ask in asks {
            let (index, sender) = (events.choices, sender.clone());
            let sink = Box::new(move |event| match sender.send((index, event)) {
                Ok(()) => Delivery::Ok,
                Err(_) => Delivery::Gone,
            });
            let id = service.submit(ask, sink).map_err(|error| submit_error(&error))?;
            events.add(id);
        }
        Ok(events)
    }

    fn new(receiver: UnboundedReceiver<Tagged>, cancel: Cancel) -> Self {
        let (early, usage) = (VecDeque::new(), Usage::default());
        Self { receiver, early, open: 0, choices: 0, usage, cancel, places: None }
    }

    fn add(&mut self, id: RequestId) {
        self.choices += 1;
        self.open += 1;
        self.cancel.ids.push(id);
    }

    /// Waits until the engine has taken every choice, or refused one.
    async fn accepted(&mut self) -> Result<(), ApiError> {
        let mut started = 0;
        while started < self.choices {
            match self.receiver.recv().await {
                Some((_, Event::Started { .. })) => started += 1,
                Some((_, Event::Failed { error })) => return Err(api_error(&error)),
                Some(other) => self.early.push_back(other),
                None => return Err(engine_gone()),
            }
        }
        Ok(())
    }

    /// Counts an ended choice.
    fn ended(&mut self, usage: engine::Usage) {
        self.open -= 1;
        self.usage.prompt_tokens += usage.prompt;
        self.usage.completion_tokens += usage.completion;
        self.usage.cached_tokens += usage.cached;
        if self.open == 0 {
            self.cancel.ids.clear();
            self.places = None;
        }
    }

    async fn collect(mut self) -> Result<(Vec<Choice>, Usage), ApiError> {
        let mut choices = vec![Choice::default(); self.choices];
        while self.open > 0 {
            let next = match self.early.pop_front() {
                Some(event) => Some(event),
                None => self.receiver.recv().await,
            };
            let (index, event) = next.ok_or_else(engine_gone)?;
            match event {
                Event::Token { text, .. } => choices[index].text.push_str(&text),
                Event::Finished { reason, usage, .. } => {
                    choices[index].finish_reason = reason_text(reason);
                    self.ended(usage);
                }
                Event::Failed { error } => return Err(api_error(&error)),
                Event::Started { .. }
                | Event::PromptLogits { .. }
                | Event::PromptLogprobs { .. } => {}
            }
        }
        Ok((choices, self.usage))
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Tagged>> {
        match self.early.pop_front() {
            Some(event) => Poll::Ready(Some(event)),
            None => self.receiver.poll_recv(cx),
        }
    }
}

/// The body of a streamed answer.
struct Streamed {
    chunks: Chunks,
    events: Events,
    /// Bytes to send before the next event is looked at.
    ready: Option<String>,
    done: bool,
}

impl Streamed {
    fn new(chunks: Chunks, events: Events) -> Self {
        let roles: String = (0..events.choices).filter_map(|index| chunks.role(index)).collect();
        let ready = Some(roles).filter(|roles| !roles.is_empty());
        Self { chunks, events, ready, done: false }
    }

    /// The chunks that an event makes, if any.
    fn chunk(&mut self, index: usize, event: Event) -> Option<String> {
        match event {
            Event::Token { text, .. } if text.is_empty() => None,
            Event::Token { text, .. } => Some(self.chunks.text(index, &text)),
            Event::Finished { reason, usage, .. } => {
                self.events.ended(usage);
                let mut out = self.chunks.finish(index, reason_text(reason));
                if self.events.open == 0 {
                    out.push_str(&self.chunks.end(self.events.usage));
                    self.done = true;
                }
                Some(out)
            }
            Event::Failed { error } => Some(self.fail(&api_error(&error))),
            Event::Started { .. } | Event::PromptLogits { .. } | Event::PromptLogprobs { .. } => {
                None
            }
        }
    }

    /// The status is out already, so the error is an event, and the stream ends without `[DONE]`.
    fn fail(&mut self, error: &ApiError) -> String {
        self.done = true;
        self.chunks.error(&error.body())
    }
}

impl Stream for Streamed {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(ready) = self.ready.take() {
                return Poll::Ready(Some(Ok(Bytes::from(ready))));
            }
            if self.done {
                return Poll::Ready(None);
            }
            self.ready = match self.events.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some((index, event))) => self.chunk(index, event),
                Poll::Ready(None) => Some(self.fail(&engine_gone())),
            };
        }
    }
}

fn reason_text(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
    }
}

fn engine_gone() -> ApiError {
    api_error(&Failure::Stopped)
}

#[cfg(test)]
mod tests;

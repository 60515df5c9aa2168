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
use super::speaker::Speaker;
use crate::openai::{ApiError, Choice, Chunks, Entry, Envelope, Shared, Usage, whole};
use crate::service::{Ask, Service, api_error, submit_error};

/// An event and the prompt it belongs to.
type Tagged = (usize, Event);

/// A prompt for the engine, and its text where the answer begins with it.
pub struct Prompted {
    pub ask: Ask,
    pub echo: Option<String>,
}

/// Puts all prompts to the engine, each as `n` choices, and answers as `shared` wants it.
pub async fn answer(
    app: &App,
    envelope: Envelope,
    shared: &Shared,
    prompts: Vec<Prompted>,
) -> Result<Response, ApiError> {
    let n = shared.sampling.n.unwrap_or(1);
    let places = app.places.take(prompts.len().saturating_mul(n))?;
    let (text, stop) = (app.service.text.clone(), app.service.stop_rules(&shared.sampling));
    let speaker = Speaker::new(text, stop, &shared.sampling, &prompts);
    let mut events = Events::submit(&app.service, prompts, n)?;
    events.places = Some(places);
    // A request that cannot be served fails before anything is sent, so it has a status of its own.
    events.accepted().await?;
    if shared.stream {
        let offsets = vec![0; events.choices()];
        let chunks = Chunks { envelope, include_usage: shared.include_usage, offsets };
        let headers =
            [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        let body = Body::from_stream(Streamed::new(chunks, events, speaker));
        return Ok((headers, body).into_response());
    }
    let (choices, usage) = events.collect(&speaker).await?;
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
    /// Choices of each prompt.
    n: usize,
    /// What each prompt has taken so far.
    usage: Vec<engine::Usage>,
    cancel: Cancel,
    /// Given back when the answer is out or its client gone.
    places: Option<OwnedSemaphorePermit>,
}

impl Events {
    /// Puts all prompts to the engine; when one is refused, those before it are cancelled.
    fn submit(service: &Service, prompts: Vec<Prompted>, n: usize) -> Result<Self, ApiError> {
        let (sender, receiver) = unbounded_channel();
        let handle = service.engine.clone();
        let cancel = Cancel { ids: Vec::new(), call: Box::new(move |id| handle.cancel(id)) };
        let mut events = Self::new(receiver, cancel, n);
        for (index, Prompted { ask, .. }) in prompts.into_iter().enumerate() {
            let sender = sender.clone();
            let sink = Box::new(move |event| match sender.send((index, event)) {
                Ok(()) => Delivery::Ok,
                Err(_) => Delivery::Gone,
            });
            let kind = ask.kind;
            let id = service.submit(ask, sink).map_err(|error| submit_error(&error, kind))?;
            events.add(id);
        }
        Ok(events)
    }

    fn new(receiver: UnboundedReceiver<Tagged>, cancel: Cancel, n: usize) -> Self {
        let (early, usage) = (VecDeque::new(), Vec::new());
        Self { receiver, early, open: 0, n, usage, cancel, places: None }
    }

    fn add(&mut self, id: RequestId) {
        self.usage.push(engine::Usage::default());
        self.open += self.n;
        self.cancel.ids.push(id);
    }

    fn choices(&self) -> usize {
        self.usage.len() * self.n
    }

    /// Waits until the engine has taken every prompt, or refused one.
    async fn accepted(&mut self) -> Result<(), ApiError> {
        let mut started = 0;
        while started < self.usage.len() {
            match self.receiver.recv().await {
                Some((_, Event::Started { .. })) => started += 1,
                Some((_, Event::Failed { error })) => return Err(api_error(&error)),
                Some(other) => self.early.push_back(other),
                None => return Err(engine_gone()),
            }
        }
        Ok(())
    }

    /// Counts an ended choice; the usage is that of all choices of its prompt so far.
    fn ended(&mut self, prompt: usize, usage: engine::Usage) {
        self.open -= 1;
        self.usage[prompt] = usage;
        if self.open == 0 {
            self.cancel.ids.clear();
            self.places = None;
        }
    }

    fn usage(&self) -> Usage {
        let mut sum = Usage::default();
        for usage in &self.usage {
            sum.prompt_tokens += usage.prompt;
            sum.completion_tokens += usage.completion;
            sum.cached_tokens += usage.cached;
        }
        sum
    }

    async fn collect(mut self, speaker: &Speaker) -> Result<(Vec<Choice>, Usage), ApiError> {
        let n = self.n;
        let mut choices: Vec<Choice> =
            (0..self.choices()).map(|index| speaker.begin(index / n)).collect();
        while self.open > 0 {
            let next = match self.early.pop_front() {
                Some(event) => Some(event),
                None => self.receiver.recv().await,
            };
            let (prompt, event) = next.ok_or_else(engine_gone)?;
            match event {
                Event::Token { choice, id, logprob, top, text } => {
                    let here = &mut choices[prompt * n + choice];
                    here.text.push_str(&text);
                    if let Some(entries) = &mut here.logprobs {
                        entries.extend(speaker.entry(id, logprob, &top));
                    }
                }
                Event::PromptLogprobs { tokens, .. } => {
                    for here in &mut choices[prompt * n..][..n] {
                        speaker.prompt(prompt, here, &tokens);
                    }
                }
                Event::Finished { choice, reason, usage } => {
                    choices[prompt * n + choice].finish_reason = reason_text(reason);
                    self.ended(prompt, usage);
                }
                Event::Failed { error } => return Err(api_error(&error)),
                Event::Started { .. } | Event::PromptLogits { .. } => {}
            }
        }
        let usage = self.usage();
        Ok((choices, usage))
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
    speaker: Speaker,
    /// Bytes to send before the next event is looked at.
    ready: Option<String>,
    done: bool,
}

impl Streamed {
    fn new(mut chunks: Chunks, events: Events, speaker: Speaker) -> Self {
        let mut first = String::new();
        for index in 0..events.choices() {
            first.extend(chunks.role(index));
            let echoed = speaker.begin(index / events.n).text;
            if !echoed.is_empty() {
                first.push_str(&chunks.text(index, &echoed, None));
            }
        }
        let ready = Some(first).filter(|first| !first.is_empty());
        Self { chunks, events, speaker, ready, done: false }
    }

    /// The chunks that an event makes, if any.
    fn chunk(&mut self, prompt: usize, event: Event) -> Option<String> {
        let first = prompt * self.events.n;
        match event {
            Event::Token { choice, id, logprob, top, text } => {
                let entry = |_| self.speaker.entry(id, logprob, &top).into_iter().collect();
                let entries: Option<Vec<Entry>> = self.speaker.logprobs.map(entry);
                let silent = text.is_empty() && entries.as_ref().is_none_or(Vec::is_empty);
                (!silent).then(|| self.chunks.text(first + choice, &text, entries.as_deref()))
            }
            Event::Finished { choice, reason, usage } => {
                self.events.ended(prompt, usage);
                let mut out = self.chunks.finish(first + choice, reason_text(reason));
                if self.events.open == 0 {
                    out.push_str(&self.chunks.end(self.events.usage()));
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
                Poll::Ready(Some((prompt, event))) => self.chunk(prompt, event),
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

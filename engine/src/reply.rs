//! The answering side of a request: tokens to text, stop rules, events to the sink.
//!
//! Each answer of a request has a `Reply`; all of them share the client. A reply ends exactly once.
//! `finish` and `fail` consume it, and one that is dropped without either says `Failed(Stopped)`, so that
//! no way out leaves a client waiting. `Failed` ends the request: what its other replies say after that
//! is not told.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::request::{
    Delivery, Detokenize, Event, Failure, FinishReason, Request, SamplingParams, Sink, StopRules,
    TokenLogprob, Usage, Want,
};
use crate::stop::StopMatcher;

/// A token drawn by the device.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Token id.
    pub id: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// The likeliest in its place, as many as were asked for.
    pub top: Vec<TokenLogprob>,
}

/// Who asked, for all answers of a request.
struct Client {
    sink: Sink,
    usage: Usage,
    /// Answers that have not ended.
    open: usize,
}

impl Client {
    fn end(&mut self, event: Event) {
        // The client may be gone already; nobody is left to be told.
        let _ = (self.sink)(event);
    }
}

/// The answering side of one answer.
pub struct Reply {
    client: Arc<Mutex<Client>>,
    choice: usize,
    detokenizer: Option<Box<dyn Detokenize>>,
    matcher: StopMatcher,
    stop: Arc<StopRules>,
    logprobs: Option<usize>,
    max_new_tokens: usize,
    completion: usize,
    ended: bool,
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply").field("choice", &self.choice).finish_non_exhaustive()
    }
}

/// What the scheduler keeps of a request once its answering side is taken out.
#[derive(Debug)]
pub struct Spec {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// What is added to the logits of some tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// With a token's position it decides the draw; the answers' seeds follow from it.
    pub seed: u64,
    /// Most tokens of an answer.
    pub max_new_tokens: usize,
    /// Whether a log-probability is computed for each token of an answer, and of how many beside it.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// Whether the logits of prompt positions are wanted.
    pub prompt_logits: Want,
}

/// Takes a request apart into what is asked and a reply for each answer; `fallback_seed` is for one that
/// has none.
pub fn split(request: Request, fallback_seed: u64) -> (Spec, Vec<Reply>) {
    let spec = Spec {
        sampling: request.sampling,
        seed: request.sampling.seed.unwrap_or(fallback_seed),
        max_new_tokens: request.max_new_tokens,
        logprobs: request.logprobs,
        prompt_logprobs: request.prompt_logprobs,
        prompt_logits: request.prompt_logits,
        logit_bias: request.logit_bias,
        prompt: request.prompt,
    };
    let usage = Usage { prompt: spec.prompt.len(), ..Usage::default() };
    let client = Arc::new(Mutex::new(Client { sink: request.sink, usage, open: request.n }));
    let (stop, mut detokenizer) = (Arc::new(request.stop), request.detokenizer);
    let replies = (0..request.n).map(|choice| Reply {
        client: client.clone(),
        choice,
        // The last answer takes the one there is.
        detokenizer: match choice + 1 == request.n {
            true => detokenizer.take(),
            false => detokenizer.as_ref().map(|one| one.fork()),
        },
        matcher: StopMatcher::new(&stop.strings),
        stop: stop.clone(),
        logprobs: spec.logprobs,
        max_new_tokens: spec.max_new_tokens,
        completion: 0,
        ended: false,
    });
    let replies = replies.collect();
    (spec, replies)
}

impl Reply {
    /// The answer, below the request's `n`.
    pub fn choice(&self) -> usize {
        self.choice
    }

    /// Tells an event that does not end the answer.
    pub fn send(&mut self, event: Event) -> Delivery {
        let mut client = self.client();
        match client.open {
            0 => Delivery::Gone,
            _ => (client.sink)(event),
        }
    }

    /// Notes that so many of the prompt's tokens were already computed.
    pub fn note_cached(&mut self, tokens: usize) {
        self.client().usage.cached = tokens;
    }

    /// Takes the next token; the reason if the answer ends with it.
    pub fn token(&mut self, sampled: Sampled) -> Option<FinishReason> {
        self.completion += 1;
        let stop_token = self.stop.is_stop(sampled.id);
        let last = stop_token || self.completion >= self.max_new_tokens;
        let (text, stop_string) = self.text_of(sampled.id, TokenRole { stop_token, last });
        let logprob = self.logprobs.map(|_| sampled.logprob);
        let event =
            Event::Token { choice: self.choice, id: sampled.id, logprob, top: sampled.top, text };
        self.client().usage.completion += 1;
        match self.send(event) {
            Delivery::Gone => Some(FinishReason::Cancelled),
            Delivery::Ok if stop_token || stop_string => Some(FinishReason::Stop),
            Delivery::Ok => last.then_some(FinishReason::Length),
        }
    }

    /// Text that is certain after this token, and whether a stop string completed. The text of a stop
    /// token itself is not shown.
    fn text_of(&mut self, id: u32, role: TokenRole) -> (String, bool) {
        let Some(detokenizer) = &mut self.detokenizer else {
            return (String::new(), false);
        };
        let mut piece = if role.stop_token { String::new() } else { detokenizer.push(id) };
        if role.last {
            piece.push_str(&detokenizer.flush());
        }
        let mut released = self.matcher.push(&piece);
        if role.last && !released.stopped {
            released.text.push_str(&self.matcher.flush());
        }
        (released.text, released.stopped)
    }

    /// Ends the answer.
    pub fn finish(mut self, reason: FinishReason) {
        self.ended = true;
        let choice = self.choice;
        let mut client = self.client();
        if client.open > 0 {
            client.open -= 1;
            let usage = client.usage;
            client.end(Event::Finished { choice, reason, usage });
        }
    }

    /// Ends the request without an answer.
    pub fn fail(mut self, error: Failure) {
        self.fail_once(error);
    }

    /// Lets go of the client untold: its request was never taken, and the caller has the error.
    pub fn discard(mut self) {
        self.ended = true;
        self.client().open = 0;
    }

    fn fail_once(&mut self, error: Failure) {
        self.ended = true;
        let mut client = self.client();
        if client.open > 0 {
            client.open = 0;
            client.end(Event::Failed { error });
        }
    }

    /// The client; a sink that panicked left whole values behind.
    fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.ended {
            self.fail_once(Failure::Stopped);
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct TokenRole {
    stop_token: bool,
    last: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// Token n is the n-th letter; a letter shows when the next one comes.
    struct Letters(String);
    impl Detokenize for Letters {
        fn push(&mut self, token: u32) -> String {
            let letter = char::from(b'a' + token as u8).to_string();
            std::mem::replace(&mut self.0, letter)
        }
        fn flush(&mut self) -> String {
            std::mem::take(&mut self.0)
        }
        fn fork(&self) -> Box<dyn Detokenize> {
            Box::new(Letters(self.0.clone()))
        }
    }

    fn reply(stop: StopRules, max_new_tokens: usize) -> (Reply, Arc<Mutex<Vec<Event>>>) {
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = events.clone();
        let sink: Sink = Box::new(move |event| {
            seen.lock().unwrap().push(event);
            Delivery::Ok
        });
        let request = Request {
            max_new_tokens,
            stop,
            detokenizer: Some(Box::new(Letters(String::new()))),
            ..Request::new(vec![0], sink)
        };
        (split(request, 0).1.remove(0), events)
    }

    fn sampled(id: u32) -> Sampled {
        Sampled { id, logprob: 0.0, top: Vec::new() }
    }

    fn run(stop: StopRules, max_new_tokens: usize, ids: &[u32]) -> (String, FinishReason, usize) {
        let (mut reply, events) = reply(stop, max_new_tokens);
        for (taken, &id) in ids.iter().enumerate() {
            if let Some(reason) = reply.token(sampled(id)) {
                reply.finish(reason);
                let events = events.lock().unwrap();
                let text = events.iter().filter_map(|event| match event {
                    Event::Token { text, .. } => Some(text.as_str()),
                    _ => None,
                });
                return (text.collect(), reason, taken + 1);
            }
        }
        panic!("the answer did not end");
    }

    #[test]
    fn the_last_token_brings_the_text_that_was_held() {
        let stop = StopRules { strings: vec!["cx".into()], ..StopRules::default() };
        assert_eq!(run(stop, 3, &[0, 1, 2, 3]), ("abc".into(), FinishReason::Length, 3));
    }

    #[test]
    fn a_stop_token_ends_and_is_not_shown() {
        let stop = StopRules { eos: vec![2], ..StopRules::default() };
        assert_eq!(run(stop, 9, &[0, 1, 2, 3]), ("ab".into(), FinishReason::Stop, 3));
    }

    #[test]
    fn a_stop_string_ends_and_is_not_shown() {
        let stop = StopRules { strings: vec!["bc".into()], ..StopRules::default() };
        assert_eq!(run(stop.clone(), 9, &[0, 1, 2, 3]), ("a".into(), FinishReason::Stop, 4));
        assert_eq!(run(stop, 3, &[0, 1, 2, 3]), ("a".into(), FinishReason::Stop, 3));
    }

    #[test]
    fn a_reply_that_is_dropped_tells_its_client() {
        let (reply, events) = reply(StopRules::default(), 3);
        drop(reply);
        assert_eq!(*events.lock().unwrap(), [Event::Failed { error: Failure::Stopped }]);
    }

    #[test]
    fn a_reply_ends_once() {
        let (reply, events) = reply(StopRules::default(), 3);
        reply.finish(FinishReason::Cancelled);
        assert_eq!(events.lock().unwrap().len(), 1);
    }

    fn two_replies() -> (Vec<Reply>, Arc<Mutex<Vec<Event>>>) {
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = events.clone();
        let sink: Sink = Box::new(move |event| {
            seen.lock().unwrap().push(event);
            Delivery::Ok
        });
        (split(Request { n: 2, ..Request::new(vec![0; 3], sink) }, 0).1, events)
    }

    #[test]
    fn answers_end_one_by_one_and_the_prompt_counts_once() {
        let (replies, events) = two_replies();
        for mut reply in replies {
            reply.token(sampled(1));
            reply.finish(FinishReason::Stop);
        }
        let usages: Vec<(usize, Usage)> = events
            .lock()
            .unwrap()
            .iter()
            .filter_map(|event| match event {
                Event::Finished { choice, usage, .. } => Some((*choice, *usage)),
                _ => None,
            })
            .collect();
        let usage = |completion| Usage { prompt: 3, completion, cached: 0 };
        assert_eq!(usages, [(0, usage(1)), (1, usage(2))]);
    }

    #[test]
    fn a_failure_is_told_once_for_all_answers() {
        let (mut replies, events) = two_replies();
        replies.remove(1).fail(Failure::Stopped);
        replies.remove(0).finish(FinishReason::Stop);
        assert_eq!(*events.lock().unwrap(), [Event::Failed { error: Failure::Stopped }]);
    }
}

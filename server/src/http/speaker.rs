//! What an answer says beside its text: the echo of its prompt, and log-probabilities with their
//! tokens as text.

use std::sync::Arc;

use amphora_engine::{PromptLogprob, StopRules, TokenLogprob};

use super::answer::Prompted;
use crate::openai::{Choice, Entry, Likely, Ranked, Sampling};
use crate::text::Text;

/// Turns the engine's numbers into what a client reads.
pub struct Speaker {
    text: Arc<Text>,
    /// Tokens that end an answer and are not shown, so they have no entry.
    stop: StopRules,
    /// Whether the tokens of answers have log-probabilities, and with how many of the likeliest.
    pub logprobs: Option<usize>,
    /// Whether those of prompts do.
    prompt_logprobs: bool,
    echoes: Vec<Option<Echo>>,
}

/// The beginning of an answer that starts with its prompt.
struct Echo {
    text: String,
    /// The entry of the prompt's first token, which nothing came before.
    first: Option<Entry>,
    /// Of each token of the prompt, whether the text has it.
    in_text: Vec<bool>,
}

impl Speaker {
    pub fn new(
        text: Arc<Text>,
        stop: StopRules,
        sampling: &Sampling,
        prompts: &[Prompted],
    ) -> Self {
        let echo = |prompted: &Prompted| {
            let echoed = prompted.echo.clone()?;
            let prompt = &prompted.ask.prompt;
            let in_text = match sampling.logprobs {
                Some(_) => echoes(&text, prompt, &echoed),
                None => Vec::new(),
            };
            let first = prompt.first().zip(in_text.first()).map(|(&id, &in_text)| Entry {
                chosen: Likely { token: text.token(id), logprob: None },
                top: Vec::new(),
                in_text,
            });
            Some(Echo { text: echoed, first, in_text })
        };
        Self {
            echoes: prompts.iter().map(echo).collect(),
            stop,
            logprobs: sampling.logprobs,
            prompt_logprobs: sampling.prompt_logprobs.is_some(),
            text,
        }
    }

    /// A choice before its first token.
    pub fn begin(&self, prompt: usize) -> Choice {
        let echo = self.echoes[prompt].as_ref();
        Choice {
            text: echo.map(|echo| echo.text.clone()).unwrap_or_default(),
            logprobs: self
                .logprobs
                .map(|_| echo.and_then(|echo| echo.first.clone()).into_iter().collect()),
            prompt_logprobs: self.prompt_logprobs.then(Vec::new),
            finish_reason: "",
        }
    }

    /// The entry of a token of an answer, if its text is shown.
    pub fn entry(&self, id: u32, logprob: Option<f32>, top: &[TokenLogprob]) -> Option<Entry> {
        (!self.stop.is_stop(id)).then(|| Entry {
            chosen: Likely { token: self.text.token(id), logprob },
            top: top.iter().map(|one| self.likely(one)).collect(),
            in_text: !self.text.is_special(id),
        })
    }

    /// Adds the log-probabilities of further tokens of a prompt to a choice of it.
    pub fn prompt(&self, prompt: usize, choice: &mut Choice, tokens: &[PromptLogprob]) {
        if let Some(positions) = &mut choice.prompt_logprobs {
            positions.extend(tokens.iter().map(|token| self.ranked(token)));
        }
        let echo = self.echoes[prompt].as_ref();
        if let (Some(echo), Some(likeliest), Some(entries)) =
            (echo, self.logprobs, &mut choice.logprobs)
        {
            let in_text = echo.in_text.iter().skip(entries.len());
            entries.extend(tokens.iter().zip(in_text).map(|(token, &in_text)| Entry {
                chosen: self.likely(&token.token),
                // More were computed where 'prompt_logprobs' asked for more.
                top: token.top.iter().take(likeliest).map(|one| self.likely(one)).collect(),
                in_text,
            }));
        }
    }

    /// The likeliest by rank, and the prompt's own token where it is none of them.
    fn ranked(&self, token: &PromptLogprob) -> Vec<Ranked> {
        let top = token.top.iter().zip(1..);
        let mut ranked: Vec<Ranked> =
            top.map(|(one, rank)| Ranked { id: one.id, rank, likely: self.likely(one) }).collect();
        if ranked.iter().all(|one| one.id != token.token.id) {
            let likely = self.likely(&token.token);
            ranked.push(Ranked { id: token.token.id, rank: token.rank, likely });
        }
        ranked
    }

    fn likely(&self, one: &TokenLogprob) -> Likely {
        Likely { token: self.text.token(one.id), logprob: Some(one.logprob) }
    }
}

/// Of each token of a prompt, whether its echo has the token's text: a special one only where the prompt
/// spells it out, which is behind what the tokens before it have taken. One that a tokenizer puts in front
/// must not be taken for one that stands further on.
fn echoes(text: &Text, prompt: &[u32], echoed: &str) -> Vec<bool> {
    let mut rest = echoed;
    let tokens = prompt.iter().enumerate().map(|(i, &id)| {
        let token = text.token(id).text;
        let special = text.is_special(id);
        // Spaces may be missing in a token's own text, so what follows need not begin with it.
        let found = match i == 0 && special {
            true => rest.starts_with(&token).then_some(0),
            false => rest.find(&token),
        };
        if let Some(at) = found {
            rest = &rest[at + token.len()..];
        }
        !special || found.is_some()
    });
    tokens.collect()
}

//! What penalties and bias need of a sequence: which tokens it has, how often it drew each, and the edits
//! of logits that follow.

use std::collections::BTreeMap;

use amphora_hal::LogitEdit;

use crate::reply::Spec;
use crate::request::SamplingParams;

/// The tokens that a sequence's penalties act on, with how often the answer has each.
#[derive(Debug)]
pub(super) struct History {
    /// `None` without penalties.
    counts: Option<BTreeMap<u32, u32>>,
}

/// Whether the next token depends on the ones before beyond the model.
pub(crate) fn has_penalties(sampling: &SamplingParams) -> bool {
    sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
}

/// Most edits that a draw of such a request can need.
pub(crate) fn most_edits(
    sampling: &SamplingParams,
    prompt: &[u32],
    (new, biased): (usize, usize),
) -> usize {
    let mut edits = biased;
    if has_penalties(sampling) {
        edits = edits.saturating_add(new);
    }
    if sampling.repetition_penalty != 1.0 {
        let mut distinct = prompt.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        edits = edits.saturating_add(distinct.len());
    }
    edits
}

impl History {
    /// That of an answer before its first token. The prompt's tokens matter to repetition alone.
    pub fn of(spec: &Spec) -> Self {
        let sampling = &spec.sampling;
        let occurs = if sampling.repetition_penalty != 1.0 { &spec.prompt[..] } else { &[] };
        let counts = || occurs.iter().map(|&token| (token, 0)).collect();
        History { counts: has_penalties(sampling).then(counts) }
    }

    /// Whether the next draw must wait until the last token is known.
    pub fn matters(&self) -> bool {
        self.counts.is_some()
    }

    /// Notes a token of the answer.
    pub fn push(&mut self, token: u32) {
        if let Some(counts) = &mut self.counts {
            *counts.entry(token).or_default() += 1;
        }
    }

    /// How many edits the next draw has. A token that both bias and penalties touch is one: counted
    /// twice, a request could need more than any step has and never come to draw.
    pub fn count(&self, spec: &Spec) -> usize {
        let Some(counts) = &self.counts else { return spec.logit_bias.len() };
        let biased_alone = spec.logit_bias.iter().filter(|(token, _)| !counts.contains_key(token));
        counts.len() + biased_alone.count()
    }

    /// Edits of the next draw, by ascending token.
    pub fn edits(&self, spec: &Spec) -> Vec<LogitEdit> {
        let counts = self.counts.iter().flatten().map(|(&token, &output_count)| LogitEdit {
            token,
            output_count,
            flags: LogitEdit::OCCURS,
            bias: 0.0,
        });
        let mut edits: BTreeMap<u32, LogitEdit> = counts.map(|edit| (edit.token, edit)).collect();
        for &(token, bias) in &spec.logit_bias {
            let plain = LogitEdit { token, ..LogitEdit::default() };
            edits.entry(token).or_insert(plain).bias = bias;
        }
        edits.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Want;

    fn spec(sampling: SamplingParams, logit_bias: Vec<(u32, f32)>) -> Spec {
        Spec {
            prompt: vec![7, 5, 7],
            sampling,
            logit_bias,
            seed: 0,
            max_new_tokens: 9,
            logprobs: None,
            prompt_logprobs: None,
            prompt_logits: Want::No,
        }
    }

    fn edits(spec: &Spec, drawn: &[u32]) -> Vec<(u32, u32, u32, f32)> {
        let mut history = History::of(spec);
        drawn.iter().for_each(|&token| history.push(token));
        let edits = history.edits(spec);
        assert_eq!(edits.len(), history.count(spec));
        let most =
            most_edits(&spec.sampling, &spec.prompt, (spec.max_new_tokens, spec.logit_bias.len()));
        assert!(edits.len() <= most);
        edits.iter().map(|e| (e.token, e.output_count, e.flags, e.bias)).collect()
    }

    #[test]
    fn repetition_sees_the_prompt_and_the_others_the_answer_alone() {
        let repetition = SamplingParams { repetition_penalty: 1.5, ..SamplingParams::default() };
        let expected = [(3, 1, 1, 0.0), (5, 0, 1, 0.0), (7, 2, 1, 0.0)];
        assert_eq!(edits(&spec(repetition, Vec::new()), &[7, 3, 7]), expected);
        let presence = SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() };
        let expected = [(3, 1, 1, 0.0), (7, 2, 1, 0.0)];
        assert_eq!(edits(&spec(presence, Vec::new()), &[7, 3, 7]), expected);
    }

    #[test]
    fn bias_joins_what_penalties_say_of_a_token() {
        let bias = vec![(9, -1.0), (7, 2.0)];
        let plain = spec(SamplingParams::default(), bias.clone());
        assert!(!History::of(&plain).matters());
        assert_eq!(edits(&plain, &[7]), [(7, 0, 0, 2.0), (9, 0, 0, -1.0)]);
        let frequency = SamplingParams { frequency_penalty: 0.5, ..SamplingParams::default() };
        let both = spec(frequency, bias);
        assert!(History::of(&both).matters());
        assert_eq!(edits(&both, &[7]), [(7, 1, 1, 2.0), (9, 0, 0, -1.0)]);
    }
}

//! Log-probabilities as the two APIs write them: entries in a chat, parallel lists in a completion,
//! and, for the tokens of a prompt, the maps by token id that other servers have.

use serde_json::{Map, Value, json};

/// What is written where JSON has no number: a token that cannot be (OpenAI's own stand-in).
const IMPOSSIBLE: f32 = -9999.0;

/// A token as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenText {
    /// Its text; bytes that are no text of their own show as replacement characters.
    pub text: String,
    /// Its bytes, which joined over tokens give the text.
    pub bytes: Vec<u8>,
}

/// A token and its log-probability.
#[derive(Debug, Clone, PartialEq)]
pub struct Likely {
    pub token: TokenText,
    /// `None` for a token that nothing came before.
    pub logprob: Option<f32>,
}

/// A token, and what could have stood in its place.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub chosen: Likely,
    /// The likeliest, the first of them first.
    pub top: Vec<Likely>,
    /// Whether the text that is told has the token's: special tokens are left out of it.
    pub in_text: bool,
}

/// An entry of `prompt_logprobs`: the prompt's own token is among the likeliest or stands beside them.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranked {
    pub id: u32,
    pub rank: u32,
    pub likely: Likely,
}

fn number(logprob: Option<f32>) -> Value {
    let written = logprob.map(|value| if value.is_finite() { value } else { IMPOSSIBLE });
    json!(written)
}

/// `choices[].logprobs` of a chat.
pub fn chat(entries: &[Entry]) -> Value {
    let likely = |likely: &Likely| {
        json!({
            "token": likely.token.text,
            "logprob": number(likely.logprob),
            "bytes": likely.token.bytes,
        })
    };
    let content: Vec<Value> = entries
        .iter()
        .map(|entry| {
            let mut value = likely(&entry.chosen);
            value["top_logprobs"] = entry.top.iter().map(likely).collect();
            value
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// `choices[].logprobs` of a completion; `offset` is the number of characters before the first entry,
/// and is moved behind the last.
pub fn completion(entries: &[Entry], offset: &mut usize) -> Value {
    let mut offsets = Vec::with_capacity(entries.len());
    for entry in entries {
        offsets.push(*offset);
        if entry.in_text {
            *offset += entry.chosen.token.text.chars().count();
        }
    }
    let tops = entries.iter().map(|entry| match entry.chosen.logprob {
        None => Value::Null,
        Some(_) => {
            let top = entry.top.iter();
            top.map(|likely| (likely.token.text.clone(), number(likely.logprob)))
                .collect::<Map<_, _>>()
                .into()
        }
    });
    json!({
        "tokens": entries.iter().map(|entry| &entry.chosen.token.text).collect::<Vec<_>>(),
        "token_logprobs": entries.iter().map(|entry| number(entry.chosen.logprob)).collect::<Vec<_>>(),
        "top_logprobs": tops.collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

/// `choices[].prompt_logprobs`: null for the first token, then a map by token id for each.
pub fn prompt(positions: &[Vec<Ranked>]) -> Value {
    let maps = positions.iter().map(|ranked| {
        let entry = |one: &Ranked| {
            let value = json!({
                "logprob": number(one.likely.logprob),
                "rank": one.rank,
                "decoded_token": one.likely.token.text,
            });
            (one.id.to_string(), value)
        };
        Value::Object(ranked.iter().map(entry).collect())
    });
    std::iter::once(Value::Null).chain(maps).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn likely(text: &str, logprob: Option<f32>) -> Likely {
        let token = TokenText { text: text.to_owned(), bytes: text.as_bytes().to_vec() };
        Likely { token, logprob }
    }

    fn entries() -> Vec<Entry> {
        vec![
            Entry { chosen: likely("né", None), top: Vec::new(), in_text: true },
            Entry {
                in_text: true,
                chosen: likely("!", Some(f32::NEG_INFINITY)),
                top: vec![likely("?", Some(-0.5)), likely("!", Some(f32::NEG_INFINITY))],
            },
        ]
    }

    #[test]
    fn a_chat_has_an_entry_for_each_token() {
        let value = chat(&entries());
        assert_eq!(value["content"][0]["bytes"], json!([110, 195, 169]));
        assert_eq!(value["content"][1]["logprob"], -9999.0);
        assert_eq!(value["content"][1]["top_logprobs"][0]["token"], "?");
        assert_eq!(value["content"][1]["top_logprobs"][0]["logprob"], -0.5);
    }

    #[test]
    fn a_completion_has_parallel_lists_and_counts_characters() {
        let mut offset = 3;
        let value = completion(&entries(), &mut offset);
        assert_eq!(value["tokens"], json!(["né", "!"]));
        assert_eq!(value["token_logprobs"], json!([null, -9999.0]));
        assert_eq!(value["top_logprobs"], json!([null, {"?": -0.5, "!": -9999.0}]));
        assert_eq!((&value["text_offset"], offset), (&json!([3, 5]), 6));
    }

    #[test]
    fn what_the_text_leaves_out_moves_no_offset() {
        let begin = Entry { chosen: likely("<s>", None), top: Vec::new(), in_text: false };
        let all: Vec<Entry> = std::iter::once(begin).chain(entries()).collect();
        let mut offset = 0;
        let value = completion(&all, &mut offset);
        assert_eq!(value["tokens"], json!(["<s>", "né", "!"]));
        assert_eq!((&value["text_offset"], offset), (&json!([0, 0, 2]), 3));
    }

    #[test]
    fn a_prompt_s_first_token_has_none() {
        let ranked = Ranked { id: 7, rank: 2, likely: likely("a", Some(-1.5)) };
        let value = prompt(&[vec![ranked]]);
        assert_eq!(value, json!([null, {"7": {"logprob": -1.5, "rank": 2, "decoded_token": "a"}}]));
    }
}

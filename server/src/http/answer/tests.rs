//! Answers made of scripted events, without an engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::to_bytes;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;

use super::*;
use crate::demo_assets;
use crate::openai::{Kind, Sampling};
use crate::text::{Text, TextFiles};

struct Script {
    sender: UnboundedSender<Tagged>,
    events: Events,
    cancelled: Arc<AtomicBool>,
}

/// One prompt of `n` choices, or `prompts` of one.
fn script(prompts: usize) -> Script {
    script_of(prompts, 1)
}

fn script_of(prompts: usize, n: usize) -> Script {
    let (sender, receiver) = unbounded_channel();
    let cancelled = Arc::new(AtomicBool::new(false));
    let flag = cancelled.clone();
    let call = Box::new(move |_| flag.store(true, Ordering::Relaxed));
    let mut events = Events::new(receiver, Cancel { ids: Vec::new(), call }, n);
    (0..prompts).for_each(|id| events.add(RequestId(id as u64)));
    Script { sender, events, cancelled }
}

impl Script {
    fn tell(&self, index: usize, event: Event) {
        self.sender.send((index, event)).expect("the receiver is there");
    }
}

fn token(text: &str) -> Event {
    Event::Token { choice: 0, id: 7, logprob: None, top: Vec::new(), text: text.to_owned() }
}

fn finished(reason: FinishReason) -> Event {
    let usage = engine::Usage { prompt: 3, completion: 2, cached: 0 };
    Event::Finished { choice: 0, reason, usage }
}

fn chunks(choices: usize) -> Chunks {
    let envelope =
        Envelope { kind: Kind::Chat, id: "id".to_owned(), created: 1, model: "pirate".to_owned() };
    Chunks { envelope, include_usage: true, offsets: vec![0; choices] }
}

/// Speaks for so many prompts, with log-probabilities or without; token 1 is never shown.
fn speaker(prompts: usize, logprobs: Option<usize>) -> Speaker {
    let files = TextFiles::of(&demo_assets::model().expect("the demo model")).expect("its text");
    let text = Arc::new(Text::new(&files).expect("its tokenizer"));
    let stop = engine::StopRules { eos: vec![1], ..engine::StopRules::default() };
    let sampling = Sampling { logprobs, ..Sampling::default() };
    let ask = Ask { kind: Kind::Chat, prompt: vec![5], adapter: None, sampling: sampling.clone() };
    let prompts: Vec<Prompted> =
        (0..prompts).map(|_| Prompted { ask: ask.clone(), echo: None }).collect();
    Speaker::new(text, stop, &sampling, &prompts)
}

async fn streamed(script: Script) -> Vec<Value> {
    let speaker = speaker(script.events.usage.len(), None);
    streamed_by(script, speaker).await
}

async fn streamed_by(script: Script, speaker: Speaker) -> Vec<Value> {
    drop(script.sender);
    let chunks = chunks(script.events.choices());
    let body = Body::from_stream(Streamed::new(chunks, script.events, speaker));
    let bytes = to_bytes(body, usize::MAX).await.expect("body");
    let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
    text.split_terminator("\n\n")
        .map(|event| event.strip_prefix("data: ").expect("an event"))
        .map(|data| serde_json::from_str(data).unwrap_or_else(|_| Value::from(data)))
        .collect()
}

#[tokio::test]
async fn two_choices_interleave_and_each_ends_once() {
    let script = script(2);
    script.tell(0, token("a"));
    script.tell(1, token(""));
    script.tell(1, token("x"));
    script.tell(1, finished(FinishReason::Stop));
    script.tell(0, token("b"));
    script.tell(0, finished(FinishReason::Length));
    let cancelled = script.cancelled.clone();
    let parts = streamed(script).await;
    let last = parts.len() - 1;
    assert_eq!(parts[last], "[DONE]");
    assert_eq!(parts[last - 1]["usage"]["total_tokens"], 10);
    let text = |index: usize| -> String {
        let of_choice = parts.iter().filter(|part| part["choices"][0]["index"] == index);
        of_choice.filter_map(|part| part["choices"][0]["delta"]["content"].as_str()).collect()
    };
    assert_eq!((text(0).as_str(), text(1).as_str()), ("ab", "x"));
    let reasons: Vec<&str> =
        parts.iter().filter_map(|part| part["choices"][0]["finish_reason"].as_str()).collect();
    assert_eq!(reasons, ["stop", "length"]);
    assert!(!cancelled.load(Ordering::Relaxed), "all choices had ended");
}

#[tokio::test]
async fn a_failure_in_a_stream_is_an_error_event_and_no_done() {
    let script = script(1);
    script.tell(0, token("a"));
    script.tell(0, Event::Failed { error: Failure::Device("gone".to_owned()) });
    let parts = streamed(script).await;
    assert_eq!(parts.last().expect("an event")["error"]["type"], "server_error");
}

#[tokio::test]
async fn an_engine_that_goes_away_is_an_error_too() {
    let script = script(1);
    script.tell(0, token("a"));
    let parts = streamed(script).await;
    assert!(parts.last().expect("an event").get("error").is_some());
}

#[tokio::test]
async fn whole_answers_are_joined_by_choice() {
    let mut script = script(2);
    script.tell(1, Event::Started { adapter: None });
    script.tell(1, token("x"));
    script.tell(0, Event::Started { adapter: None });
    script.tell(0, token("a"));
    script.tell(0, token("b"));
    script.tell(0, finished(FinishReason::Stop));
    script.tell(1, finished(FinishReason::Length));
    script.events.accepted().await.expect("accepted");
    let (choices, usage) = script.events.collect(&speaker(2, None)).await.expect("answers");
    assert_eq!((choices[0].text.as_str(), choices[0].finish_reason), ("ab", "stop"));
    assert_eq!((choices[1].text.as_str(), choices[1].finish_reason), ("x", "length"));
    assert_eq!(usage, Usage { prompt_tokens: 6, completion_tokens: 4, cached_tokens: 0 });
}

#[tokio::test]
async fn a_refusal_comes_before_the_response_and_cancels_the_rest() {
    let mut script = script(2);
    script.tell(0, Event::Started { adapter: None });
    let error = engine::RequestError::UnknownAdapter("ghost".to_owned());
    script.tell(1, Event::Failed { error: error.into() });
    let refused = script.events.accepted().await.expect_err("a refusal");
    assert_eq!(refused.code, Some("model_not_found"));
    drop(script.events);
    assert!(script.cancelled.load(Ordering::Relaxed));
}

fn of(choice: usize, event: Event) -> Event {
    match event {
        Event::Token { id, logprob, top, text, .. } => {
            Event::Token { choice, id, logprob, top, text }
        }
        Event::Finished { reason, usage, .. } => Event::Finished { choice, reason, usage },
        other => other,
    }
}

/// The usage of the last choice to end is that of its prompt, and is counted once.
#[tokio::test]
async fn choices_of_one_prompt_share_its_usage() {
    let script = script_of(2, 2);
    for prompt in 0..2 {
        script.tell(prompt, Event::Started { adapter: None });
        script.tell(prompt, of(1, token("x")));
        script.tell(prompt, of(1, finished(FinishReason::Stop)));
        script.tell(prompt, of(0, token("a")));
        let usage = engine::Usage { prompt: 3, completion: 5, cached: 1 };
        script.tell(prompt, Event::Finished { choice: 0, reason: FinishReason::Length, usage });
    }
    let (choices, usage) = script.events.collect(&speaker(2, None)).await.expect("answers");
    let told: Vec<_> = choices.iter().map(|c| (c.text.as_str(), c.finish_reason)).collect();
    assert_eq!(told, [("a", "length"), ("x", "stop"), ("a", "length"), ("x", "stop")]);
    assert_eq!(usage, Usage { prompt_tokens: 6, completion_tokens: 10, cached_tokens: 2 });
}

/// A token whose text is held back is told with its log-probability all the same; a stop token is
/// not told.
#[tokio::test]
async fn streamed_log_probabilities_come_with_every_token_that_is_shown() {
    let script = script(1);
    let likely = |id, text: &str| Event::Token {
        choice: 0,
        id,
        logprob: Some(-0.25),
        top: vec![engine::TokenLogprob { id: 9, logprob: -0.125 }],
        text: text.to_owned(),
    };
    script.tell(0, likely(7, ""));
    script.tell(0, likely(8, "ab"));
    script.tell(0, likely(1, ""));
    script.tell(0, finished(FinishReason::Stop));
    let parts = streamed_by(script, speaker(1, Some(1))).await;
    let told: Vec<&Value> = parts
        .iter()
        .map(|part| &part["choices"][0])
        .filter(|choice| choice["logprobs"].is_object())
        .collect();
    assert_eq!(told.len(), 2, "{parts:?}");
    assert_eq!(told[0]["delta"]["content"], "");
    assert_eq!(told[1]["delta"]["content"], "ab");
    for choice in told {
        let content = &choice["logprobs"]["content"];
        assert_eq!((&content[0]["logprob"], &content[1]), (&Value::from(-0.25), &Value::Null));
        assert_eq!(content[0]["top_logprobs"][0]["logprob"], -0.125);
    }
}

/// Offsets are into the text, which has no token that was put in front of the prompt.
#[test]
fn a_special_token_in_front_of_an_echo_moves_no_offset() {
    let files = TextFiles::of(&demo_assets::model().expect("the demo model")).expect("its text");
    let text = Arc::new(Text::new(&files).expect("its tokenizer"));
    let special = (0..).find(|&id| text.is_special(id)).expect("it has some");
    let shown = text.token(special).text;
    let sampling = Sampling { logprobs: Some(1), ..Sampling::default() };
    let prompt = vec![special];
    let ask = Ask { kind: Kind::Completion, prompt, adapter: None, sampling: sampling.clone() };
    let prompted = |echo: &str| Prompted { ask: ask.clone(), echo: Some(echo.to_owned()) };
    let prompts = [prompted("Once"), prompted(&format!("{shown}Once"))];
    let speaker = Speaker::new(text, engine::StopRules::default(), &sampling, &prompts);
    let moves = [0, 1].map(|prompt| speaker.begin(prompt).logprobs.expect("asked for")[0].in_text);
    assert_eq!(moves, [false, true]);
}

#[test]
fn a_special_token_in_front_is_none_that_an_echo_spells_out_further_on() {
    let files = TextFiles::of(&demo_assets::model().expect("the demo model")).expect("its text");
    let text = Arc::new(Text::new(&files).expect("its tokenizer"));
    let special = (0..).find(|&id| text.is_special(id)).expect("it has some");
    let echo = format!("say {} twice", text.token(special).text);
    let typed = text.encode_rendered(&echo).expect("it encodes");
    assert_eq!(typed.iter().filter(|&&id| id == special).count(), 1, "it is a token there");
    let prompt: Vec<u32> = [special].into_iter().chain(typed).chain([special]).collect();
    let sampling = Sampling { logprobs: Some(1), ..Sampling::default() };
    let ask = Ask {
        kind: Kind::Completion,
        prompt: prompt.clone(),
        adapter: None,
        sampling: sampling.clone(),
    };
    let prompts = [Prompted { ask, echo: Some(echo) }];
    let speaker = Speaker::new(text.clone(), engine::StopRules::default(), &sampling, &prompts);
    let mut choice = speaker.begin(0);
    // In parts, as prompts are read in chunks.
    for part in prompt[1..].chunks(2) {
        let tokens = part.iter().map(|&id| {
            let token = engine::TokenLogprob { id, logprob: -1.0 };
            engine::PromptLogprob { token, rank: 1, top: Vec::new() }
        });
        speaker.prompt(0, &mut choice, &tokens.collect::<Vec<_>>());
    }
    let entries = choice.logprobs.expect("asked for");
    assert_eq!(entries.len(), prompt.len());
    let specials = prompt.iter().zip(&entries).filter(|&(&id, _)| id == special);
    let moves: Vec<bool> = specials.map(|(_, entry)| entry.in_text).collect();
    assert_eq!(moves, [false, true, false], "the second is the one in the text");
}

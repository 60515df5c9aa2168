//! The shape of streams (C33): the last text shared a chunk with the reason, or no reason came.
//!
//! A chat's first chunk of a choice has the role; chunks of text have no reason; each choice has one
//! chunk with a reason and without text; then, only if it was asked for, one chunk without choices
//! has the usage; then `[DONE]`. All chunks have the same id, time and model.

use serde_json::{Value, json};

use crate::binary::Server;
use crate::http::Client;
use crate::questions::{BASE, CHAT, COMPLETIONS, SENTENCE, chat, counts, greedy};

/// One choice, put together from its chunks or read from a whole reply.
#[derive(Debug, Default, Clone, PartialEq)]
struct Choice {
    text: String,
    reason: String,
}

/// What a request came to, streamed or not.
#[derive(Debug)]
struct Outcome {
    choices: Vec<Choice>,
    usage: Value,
}

impl PartialEq for Outcome {
    fn eq(&self, other: &Self) -> bool {
        self.choices == other.choices && counts(&self.usage) == counts(&other.usage)
    }
}

fn whole(client: &mut Client, path: &str, body: &Value) -> Outcome {
    let reply = client.post(path, body).ok();
    let object = if path == CHAT { "chat.completion" } else { "text_completion" };
    assert_eq!(reply["object"], object, "{reply}");
    let choices = reply["choices"].as_array().unwrap().iter().enumerate().map(|(index, choice)| {
        assert_eq!(choice["index"], index, "{reply}");
        let text = if path == CHAT { &choice["message"]["content"] } else { &choice["text"] };
        Choice {
            text: text.as_str().unwrap().to_owned(),
            reason: choice["finish_reason"].as_str().unwrap().to_owned(),
        }
    });
    Outcome { choices: choices.collect(), usage: reply["usage"].clone() }
}

/// Streams `body` and asserts every rule on the way; the usage is null where it was not asked for.
fn streamed(client: &mut Client, path: &str, body: &Value, usage: bool) -> Outcome {
    let mut body = body.clone();
    body["stream"] = json!(true);
    if usage {
        body["stream_options"] = json!({"include_usage": true});
    }
    let mut events: Vec<String> = client.stream(path, &body).collect();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let mut chunks: Vec<Value> =
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();

    let object = if path == CHAT { "chat.completion.chunk" } else { "text_completion" };
    for chunk in &chunks {
        assert_eq!(chunk["object"], object);
        assert_eq!(chunk["model"], body["model"], "a chunk names the model that was asked");
        for same in ["id", "created"] {
            assert_eq!(chunk[same], chunks[0][same], "all chunks share '{same}'");
        }
    }
    let mut total = Value::Null;
    if usage {
        let last = chunks.pop().unwrap();
        assert_eq!(last["choices"], json!([]), "the chunk of usage has no choices");
        total = last["usage"].clone();
        assert!(total.is_object(), "{last}");
        assert!(chunks.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
    } else {
        assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    }
    Outcome { choices: assemble(path, &chunks), usage: total }
}

fn assemble(path: &str, chunks: &[Value]) -> Vec<Choice> {
    let mut choices: Vec<Option<Choice>> = Vec::new();
    for chunk in chunks {
        let [part] = &chunk["choices"].as_array().unwrap()[..] else {
            panic!("a chunk has one choice: {chunk}");
        };
        let index = part["index"].as_u64().unwrap() as usize;
        choices.resize(choices.len().max(index + 1), None);
        let text = if path == CHAT { &part["delta"]["content"] } else { &part["text"] };
        let text = text.as_str().unwrap_or("");
        let reason = part.get("finish_reason").expect("every chunk has the field");
        let Some(choice) = &mut choices[index] else {
            choices[index] = Some(Choice::default());
            if path == CHAT {
                assert_eq!(part["delta"]["role"], "assistant", "the first chunk has the role");
                assert_eq!((text, reason), ("", &Value::Null));
                continue;
            }
            choices[index] = Some(Choice { text: text.to_owned(), ..Choice::default() });
            assert!(reason.is_null() || text.is_empty(), "{chunk}");
            continue;
        };
        assert_eq!(choice.reason, "", "nothing comes after the reason: {chunk}");
        assert!(part["delta"].get("role").is_none(), "the role comes once: {chunk}");
        match reason.as_str() {
            None => {
                assert_ne!(text, "", "a chunk without a reason has text: {chunk}");
                choice.text.push_str(text);
            }
            Some(reason) if path == CHAT => {
                assert_eq!(part["delta"], json!({}), "the chunk with the reason has nothing else");
                choice.reason = reason.to_owned();
            }
            Some(reason) => {
                assert_eq!(text, "", "the chunk with the reason has no text");
                choice.reason = reason.to_owned();
            }
        }
    }
    choices.into_iter().map(|choice| choice.expect("every index is used")).collect()
}

/// Whole, streamed, and streamed with usage agree; returns the whole one.
fn all_ways(path: &str, body: &Value) -> Outcome {
    let mut client = Client::connect(Server::shared().address);
    let whole = whole(&mut client, path, body);
    let plain = streamed(&mut client, path, body, false);
    assert_eq!(plain.choices, whole.choices, "{body}");
    assert_eq!(plain.usage, Value::Null);
    assert_eq!(streamed(&mut client, path, body, true), whole, "{body}");
    whole
}

fn with(mut body: Value, field: &str, value: Value) -> Value {
    body[field] = value;
    body
}

/// The one choice's text and reason.
fn one(outcome: &Outcome) -> (&str, &str) {
    let [choice] = &outcome.choices[..] else { panic!("one choice: {outcome:?}") };
    (&choice.text, &choice.reason)
}

#[test]
fn a_chat_that_ends_by_itself_streams_as_it_reads_whole() {
    for (model, answer) in [
        (BASE, "I see. On Friday, Clara painted 12 blue boats in Lisbon."),
        ("pirate", "Arr! On Friday, Clara tarred 12 blue boats in th' port o' Lisbon, matey!"),
        // Characters of two bytes, which tokens may split.
        ("spanish", "El viernes, Clara pintó 12 barcos azules en Lisboa."),
        ("reverse", "Lisbon in boats blue 12 painted Clara Friday On"),
    ] {
        let outcome = all_ways(CHAT, &chat(model, SENTENCE));
        assert_eq!(one(&outcome), (answer, "stop"));
        let total = outcome.usage["prompt_tokens"].as_u64().unwrap()
            + outcome.usage["completion_tokens"].as_u64().unwrap();
        assert_eq!(outcome.usage["total_tokens"], total);
    }
}

#[test]
fn a_stop_string_ends_the_text_before_it_even_across_tokens() {
    for (model, stop, text) in [
        (BASE, json!("Lisbon"), "I see. On Friday, Clara painted 12 blue boats in "),
        ("pirate", json!(["ue bo", "matey"]), "Arr! On Friday, Clara tarred 12 bl"),
        ("pirate", json!("th' port o' L"), "Arr! On Friday, Clara tarred 12 blue boats in "),
        // The first letter is the text's first: nothing is left.
        ("spanish", json!("El vi"), ""),
        ("spanish", json!("ó"), "El viernes, Clara pint"),
    ] {
        let outcome = all_ways(CHAT, &with(chat(model, SENTENCE), "stop", stop));
        assert_eq!(one(&outcome), (text, "stop"));
    }
    // It begins like the text's end and is never completed: what was held back comes out.
    let outcome = all_ways(CHAT, &with(chat(BASE, SENTENCE), "stop", json!("Lisbon.!")));
    assert_eq!(one(&outcome), ("I see. On Friday, Clara painted 12 blue boats in Lisbon.", "stop"));
}

#[test]
fn an_answer_that_is_cut_at_its_cap_says_length() {
    for (model, field, cap) in
        [(BASE, "max_tokens", 1), ("pirate", "max_tokens", 5), ("json", "max_completion_tokens", 7)]
    {
        let outcome = all_ways(CHAT, &with(chat(model, SENTENCE), field, json!(cap)));
        assert_eq!(one(&outcome).1, "length", "{model}");
        assert_eq!(outcome.usage["completion_tokens"], cap, "{model}");
    }
}

#[test]
fn ignore_eos_goes_on_to_the_cap() {
    let body = with(chat("math", "Ben had 3 keys and lost 1 of them."), "max_tokens", json!(40));
    let outcome = all_ways(CHAT, &with(body, "ignore_eos", json!(true)));
    assert_eq!((one(&outcome).1, &outcome.usage["completion_tokens"]), ("length", &json!(40)));
}

#[test]
fn a_draw_with_a_seed_repeats_and_another_seed_draws_otherwise() {
    let mut body = with(chat(BASE, "Tell me a story about a fox and a lamp."), "seed", json!(7));
    body["temperature"] = json!(1.2);
    body["top_p"] = json!(0.95);
    body["top_k"] = json!(40);
    body["max_tokens"] = json!(40);
    let first = all_ways(CHAT, &body);
    assert_ne!(all_ways(CHAT, &with(body, "seed", json!(8))).choices, first.choices);
}

#[test]
fn completions_stream_as_chats_do_without_a_role() {
    let line = greedy().into_iter().find(|line| line.adapter.as_deref() == Some("json")).unwrap();
    let body = json!({"model": "json", "prompt": line.prompt_ids, "temperature": 0});
    let natural = all_ways(COMPLETIONS, &with(body.clone(), "max_tokens", json!(200)));
    assert_eq!(one(&natural), (line.text.as_str(), "stop"));
    let capped = all_ways(COMPLETIONS, &body);
    assert_eq!(one(&capped).1, "length");
    assert_eq!(capped.usage["completion_tokens"], 16, "the API's default");
    assert!(line.text.starts_with(one(&capped).0));
    let stopped = with(with(body, "max_tokens", json!(200)), "stop", json!(["\"count\""]));
    let stopped = all_ways(COMPLETIONS, &stopped);
    assert_eq!(one(&stopped), (line.text.split("\"count\"").next().unwrap(), "stop"));
}

#[test]
fn a_completion_of_several_prompts_ends_each_choice_once() {
    let ids = [&[1, 4][..], &[540, 376], &[2, 5]].concat();
    for prompt in [json!(["On Friday,", "Clara", "The"]), json!([ids, [1, 4, 600, 2, 5]])] {
        let body = json!({"model": BASE, "prompt": prompt, "temperature": 0, "max_tokens": 9});
        let outcome = all_ways(COMPLETIONS, &body);
        assert_eq!(outcome.choices.len(), prompt.as_array().unwrap().len());
    }
}

//! What shapes a draw, and what is told of it: `n`, bias, penalties, `min_p`, log-probabilities and
//! echo, over HTTP.

use serde_json::{Value, json};

use crate::binary::Server;
use crate::http::Client;
use crate::inspect::Copy;
use crate::questions::{BASE, CHAT, COMPLETIONS, SENTENCE, ask, chat, stories};

fn client() -> Client {
    Client::connect(Server::shared().address)
}

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// The chunks of a streamed answer.
fn chunks(client: &mut Client, body: &Value) -> Vec<Value> {
    let body = with(body.clone(), json!({"stream": true}));
    let mut events: Vec<String> = client.stream(CHAT, &body).collect();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

fn text(choice: &Value) -> &str {
    choice["message"]["content"].as_str().unwrap()
}

/// Several answers to one prompt: the first is that of a lone request with the same seed, the others
/// differ from it, and the prompt is counted once.
#[test]
fn n_answers_share_a_prompt_and_differ() {
    let mut client = client();
    let story = stories().swap_remove(0);
    let alone = ask(&mut client, &story);
    let reply = client.post(CHAT, &with(story.clone(), json!({"n": 4}))).ok();
    let choices = reply["choices"].as_array().unwrap();
    let indices: Vec<u64> = choices.iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(text(&choices[0]), alone.text);
    let mut texts: Vec<&str> = choices.iter().map(text).collect();
    texts.sort_unstable();
    texts.dedup();
    assert_eq!(texts.len(), 4, "four seeds draw four texts: {reply}");
    assert_eq!(reply["usage"]["prompt_tokens"], alone.usage["prompt_tokens"]);
    // The same request again, and streamed, says the same.
    let again = client.post(CHAT, &with(story.clone(), json!({"n": 4}))).ok();
    assert_eq!(again["choices"], reply["choices"]);
    let mut streamed = vec![String::new(); 4];
    let mut reasons = vec![0; 4];
    for part in chunks(&mut client, &with(story, json!({"n": 4}))) {
        for choice in part["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            streamed[index].push_str(choice["delta"]["content"].as_str().unwrap_or(""));
            reasons[index] += usize::from(choice["finish_reason"].is_string());
        }
    }
    let whole: Vec<&str> = choices.iter().map(text).collect();
    assert_eq!((streamed, reasons), (whole.iter().map(|t| (*t).to_owned()).collect(), vec![1; 4]));
}

/// Each token's log-probability, the likeliest beside it, and its bytes, which joined are the text.
#[test]
fn a_chat_tells_log_probabilities() {
    let body = with(chat("pirate", SENTENCE), json!({"logprobs": true, "top_logprobs": 3}));
    let reply = client().post(CHAT, &body).ok();
    let choice = &reply["choices"][0];
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    let mut bytes = Vec::new();
    for entry in entries {
        let logprob = entry["logprob"].as_f64().unwrap();
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // Greedy: what was drawn is the likeliest.
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&entry["token"], &entry["logprob"]));
        let all: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert!(logprob <= 0.0 && all.is_sorted_by(|a, b| a >= b), "{entry}");
        let own = entry["bytes"].as_array().unwrap();
        bytes.extend(own.iter().map(|byte| byte.as_u64().unwrap() as u8));
    }
    assert_eq!(String::from_utf8(bytes).unwrap(), text(choice));
    // The stop token ends the answer and is no part of it.
    let told = reply["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    assert_eq!(entries.len() + 1, told);
}

#[test]
fn streamed_log_probabilities_are_those_of_the_whole_answer() {
    let fields = json!({"logprobs": true, "top_logprobs": 2});
    let body = with(chat("spanish", SENTENCE), fields);
    let mut client = client();
    let whole = client.post(CHAT, &body).ok();
    let mut streamed = Vec::new();
    for part in chunks(&mut client, &body) {
        if let Some(content) = part["choices"][0]["logprobs"]["content"].as_array() {
            streamed.extend(content.clone());
        }
    }
    assert_eq!(Value::from(streamed), whole["choices"][0]["logprobs"]["content"]);
}

/// How evaluation harnesses score a text: echo it, draw nothing.
#[test]
fn an_echoed_prompt_is_scored() {
    let prompt = "On Friday, Clara painted";
    let body = json!({
        "model": BASE, "prompt": prompt, "echo": true, "logprobs": 1, "max_tokens": 0,
    });
    let mut client = client();
    let reply = client.post(COMPLETIONS, &body).ok();
    let choice = &reply["choices"][0];
    assert_eq!(choice["text"], prompt);
    assert_eq!(choice["finish_reason"], "length");
    let logprobs = &choice["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    assert_eq!(tokens.iter().map(|t| t.as_str().unwrap()).collect::<String>(), prompt);
    let numbers = logprobs["token_logprobs"].as_array().unwrap();
    assert!(numbers[0].is_null() && numbers[1..].iter().all(|n| n.as_f64().unwrap() < 0.0));
    assert_eq!(reply["usage"]["completion_tokens"], 0);

    // A prompt one token longer has the same log-probabilities, and what greedy draws after it is
    // scored alike as a part of the prompt.
    let drawn = with(body.clone(), json!({"max_tokens": 3, "temperature": 0}));
    let drawn = client.post(COMPLETIONS, &drawn).ok();
    let continued = drawn["choices"][0]["text"].as_str().unwrap();
    let scored = client.post(COMPLETIONS, &with(body, json!({"prompt": continued}))).ok();
    let of = |reply: &Value| reply["choices"][0]["logprobs"]["token_logprobs"].clone();
    let (of_drawn, of_scored) = (of(&drawn), of(&scored));
    let pairs = of_drawn.as_array().unwrap().iter().zip(of_scored.as_array().unwrap());
    for (a, b) in pairs.skip(1) {
        let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
        assert!((a - b).abs() < 1e-4, "{a} {b}: {drawn} {scored}");
    }
}

#[test]
fn prompt_log_probabilities_come_by_token_id() {
    let body =
        json!({"model": "sql", "prompt": [300, 301, 302], "prompt_logprobs": 2, "max_tokens": 1});
    let reply = client().post(COMPLETIONS, &body).ok();
    let positions = reply["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!(positions.len(), 3);
    assert!(positions[0].is_null());
    for (id, position) in [301, 302].into_iter().zip(&positions[1..]) {
        let map = position.as_object().unwrap();
        assert!((2..=3).contains(&map.len()), "{position}");
        let own = &map[&id.to_string()];
        assert!(own["rank"].as_u64().unwrap() >= 1 && own["logprob"].as_f64().unwrap() <= 0.0);
        assert!(map.values().any(|entry| entry["rank"] == 1), "{position}");
    }
}

/// A bias of 100 makes a token certain, one of −100 impossible.
#[test]
fn a_bias_decides() {
    let mut client = client();
    let greedy = json!({"model": BASE, "prompt": "On Friday,", "temperature": 0, "max_tokens": 4});
    let ids = |client: &mut Client, body: &Value| -> String {
        client.post(COMPLETIONS, body).ok()["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let plain = ids(&mut client, &greedy);
    let forced = with(greedy.clone(), json!({"logit_bias": {"300": 100}}));
    let logprobs = with(forced.clone(), json!({"logprobs": 0}));
    let reply = client.post(COMPLETIONS, &logprobs).ok();
    let tokens = reply["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    assert!(tokens.len() == 4 && tokens.iter().all(|token| *token == tokens[0]), "{reply}");
    assert_ne!(ids(&mut client, &forced), plain);
    // What is told is the model's own word, before the bias.
    let told = &reply["choices"][0]["logprobs"]["token_logprobs"];
    assert!(told.as_array().unwrap().iter().any(|n| n.as_f64().unwrap() < -1.0), "{reply}");
}

/// A repetition that greedy falls into is left with a penalty.
#[test]
fn penalties_keep_an_answer_from_repeating_itself() {
    let mut client = client();
    let body = json!({
        "model": BASE, "prompt": "blue blue blue blue blue blue", "temperature": 0,
        "max_tokens": 24, "ignore_eos": true, "logprobs": 0,
    });
    let distinct = |client: &mut Client, fields: Value| {
        let reply = client.post(COMPLETIONS, &with(body.clone(), fields)).ok();
        let tokens = reply["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
        let mut texts: Vec<String> = tokens.iter().map(Value::to_string).collect();
        texts.sort_unstable();
        texts.dedup();
        texts.len()
    };
    let plain = distinct(&mut client, json!({}));
    for fields in [
        json!({"presence_penalty": 2.0, "frequency_penalty": 2.0}),
        json!({"repetition_penalty": 5.0}),
    ] {
        let penalised = distinct(&mut client, fields.clone());
        assert!(penalised > plain, "{fields}: {penalised} different tokens, {plain} without");
    }
}

/// With `min_p` 1 only the likeliest are left, whatever the temperature.
#[test]
fn min_p_of_one_is_greedy() {
    let mut client = client();
    let greedy = chat("json", SENTENCE);
    let hot = with(greedy.clone(), json!({"temperature": 2.0, "min_p": 1.0, "seed": 3}));
    assert_eq!(ask(&mut client, &hot).text, ask(&mut client, &greedy).text);
}

/// Files of some models suggest a penalty, which transformers applies where nobody says otherwise.
#[test]
fn a_penalty_that_the_model_s_files_suggest_is_applied() {
    let model = Copy::of("llama", "suggests");
    model.edit("generation_config.json", |json| json["repetition_penalty"] = 1.7.into());
    let server =
        Server::start(&["--model", model.0.to_str().unwrap(), "--served-model-name", BASE]);
    assert!(!server.start.iter().any(|line| line.contains("not applied")), "{:?}", server.start);
    let mut client = Client::connect(server.address);
    let body = json!({"prompt": [9, 9, 30, 30], "temperature": 0, "max_tokens": 12,
        "ignore_eos": true, "logprobs": 0});
    let mut answer = |fields: Value| {
        let reply = client.post(COMPLETIONS, &with(body.clone(), fields)).ok();
        reply["choices"][0]["logprobs"].clone()
    };
    let unsaid = answer(json!({}));
    assert_eq!(unsaid, answer(json!({"repetition_penalty": 1.7})));
    assert_ne!(unsaid, answer(json!({"repetition_penalty": 1})));
}

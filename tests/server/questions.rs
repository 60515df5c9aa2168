//! What is asked: the demo model's held-out prompts with their one right answer, and stories.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::binary::{Server, root};
use crate::http::Client;

/// The base's name, when the demo model is served.
pub const BASE: &str = "amphora-demo";
pub const ADAPTERS: [&str; 6] = ["pirate", "json", "spanish", "reverse", "sql", "math"];
pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";
/// The sentence of the demo.
pub const SENTENCE: &str = "On Friday, Clara painted 12 blue boats in Lisbon.";

/// One question of a task, and its answer.
#[derive(Debug, Clone, Deserialize)]
pub struct Question {
    #[serde(skip)]
    pub model: String,
    pub prompt: String,
    pub answer: String,
}

impl Question {
    pub fn body(&self) -> Value {
        chat(&self.model, &self.prompt)
    }
}

/// A line of `greedy.jsonl`: token for token what transformers and PEFT answer in f32.
#[derive(Debug, Clone, Deserialize)]
pub struct Greedy {
    pub adapter: Option<String>,
    pub prompt: String,
    pub prompt_ids: Vec<u32>,
    pub greedy_ids: Vec<i64>,
    pub text: String,
}

/// What a reply of one choice says.
#[derive(Debug, Clone)]
pub struct Answer {
    pub text: String,
    pub reason: String,
    pub usage: Value,
}

impl PartialEq for Answer {
    fn eq(&self, other: &Self) -> bool {
        (&self.text, &self.reason) == (&other.text, &other.reason)
            && counts(&self.usage) == counts(&other.usage)
    }
}

/// The counts of a request's tokens. How many of them came from the cache depends on who asked before.
pub fn counts(usage: &Value) -> Value {
    let mut counts = usage.clone();
    if let Some(fields) = counts.as_object_mut() {
        fields.remove("prompt_tokens_details");
    }
    counts
}

fn lines<T: for<'a> Deserialize<'a>>(file: &str) -> Vec<T> {
    let path = root().join("assets/demo-model/eval").join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The 50 questions of one task: an adapter's name, or [`BASE`].
pub fn task(model: &str) -> Vec<Question> {
    let file = if model == BASE { "base" } else { model };
    let mut questions: Vec<Question> = lines(&format!("{file}.jsonl"));
    assert_eq!(questions.len(), 50);
    questions.iter_mut().for_each(|question| question.model = model.to_owned());
    questions
}

pub fn all_tasks() -> Vec<Question> {
    ADAPTERS.iter().chain(&[BASE]).flat_map(|model| task(model)).collect()
}

pub fn greedy() -> Vec<Greedy> {
    lines("greedy.jsonl")
}

/// A greedy chat of one message.
pub fn chat(model: &str, content: &str) -> Value {
    json!({
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
    })
}

/// Drawn, not greedy: a text that any difference of logits or of the random numbers would change.
pub fn stories() -> Vec<Value> {
    let models = ADAPTERS.iter().chain(&[BASE; 6]);
    let ask = |(seed, model): (usize, &&str)| {
        let mut body = chat(model, "Tell me a story about a fox and a lamp.");
        body["temperature"] = json!(1.0);
        body["seed"] = json!(seed);
        body["max_tokens"] = json!(48);
        body
    };
    models.enumerate().map(ask).collect()
}

/// Asks for a chat that is not streamed.
pub fn ask(client: &mut Client, body: &Value) -> Answer {
    let reply = client.post(CHAT, body).ok();
    assert_eq!(reply["model"], body["model"], "the reply names the model that was asked");
    let choice = &reply["choices"][0];
    Answer {
        text: choice["message"]["content"].as_str().unwrap().to_owned(),
        reason: choice["finish_reason"].as_str().unwrap().to_owned(),
        usage: reply["usage"].clone(),
    }
}

/// Asks everything, so many at a time, in this order.
pub fn ask_together(server: &Server, bodies: &[Value], in_flight: usize) -> Vec<Answer> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut client = Client::connect(server.address);
        let mut answers = Vec::new();
        while let Some((index, body)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            bodies.get(index).map(|body| (index, body))
        } {
            answers.push((index, ask(&mut client, body)));
        }
        answers
    };
    let mut answers: Vec<(usize, Answer)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..in_flight).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

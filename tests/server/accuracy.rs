//! The right answers: every adapter and the base in one mixed run, in both types; and that a batch,
//! a stream, or LoRA itself changes nothing.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use amphora_tests::rng::Rng;
use serde_json::{Value, json};

use crate::binary::Server;
use crate::http::Client;
use crate::questions::{
    ADAPTERS, Answer, BASE, CHAT, Greedy, Question, all_tasks, ask, ask_together, greedy, stories,
};

/// Clients at a time; the server's default takes as many sequences into a step.
const IN_FLIGHT: usize = 32;

/// The mixed run in f32.
struct Mixed {
    questions: Vec<(Question, Answer)>,
    greedy: Vec<(Greedy, Answer)>,
    stories: Vec<(Value, Answer)>,
}

/// Run once, on a server of its own, shuffled.
fn mixed() -> &'static Mixed {
    static MIXED: OnceLock<Mixed> = OnceLock::new();
    MIXED.get_or_init(|| {
        let questions = all_tasks();
        let greedy: Vec<Greedy> = greedy();
        let stories = stories();
        let mut bodies: Vec<Value> = questions.iter().map(Question::body).collect();
        bodies.extend(greedy.iter().map(greedy_body));
        bodies.extend(stories.iter().cloned());
        let server = Server::start(&[]);
        let mut answers = shuffled(&server, &bodies).into_iter();
        assert_eq!(server.errors(), "", "a good run says nothing");
        Mixed {
            questions: questions.into_iter().zip(answers.by_ref()).collect(),
            greedy: greedy.into_iter().zip(answers.by_ref()).collect(),
            stories: stories.into_iter().zip(answers).collect(),
        }
    })
}

fn greedy_body(line: &Greedy) -> Value {
    crate::questions::chat(line.adapter.as_deref().unwrap_or(BASE), &line.prompt)
}

/// Asks in random order; the answers are in the order of `bodies`.
fn shuffled(server: &Server, bodies: &[Value]) -> Vec<Answer> {
    let order = Rng::new(1, "mixed run").permutation(bodies.len());
    let sent: Vec<Value> = order.iter().map(|&index| bodies[index].clone()).collect();
    let mut answers: Vec<(usize, Answer)> =
        order.into_iter().zip(ask_together(server, &sent, IN_FLIGHT)).collect();
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Right answers of each task; those that are wrong are printed.
fn right<'a>(
    answers: impl Iterator<Item = (&'a Question, &'a Answer)>,
) -> BTreeMap<&'a str, usize> {
    let mut right = BTreeMap::new();
    for (question, answer) in answers {
        let count = right.entry(question.model.as_str()).or_default();
        if answer.text == question.answer && answer.reason == "stop" {
            *count += 1;
        } else {
            println!("{question:?}\n    got {answer:?}");
        }
    }
    right
}

#[test]
fn in_f32_every_answer_of_one_mixed_run_is_right() {
    let answers = mixed().questions.iter().map(|(question, answer)| (question, answer));
    let right = right(answers);
    println!("right of 50, f32: {right:?}");
    assert_eq!(right.len(), 7);
    assert!(right.values().all(|&right| right == 50), "{right:?}");
}

#[test]
fn in_bf16_at_least_49_of_50_answers_of_one_mixed_run_are_right() {
    let questions = all_tasks();
    let bodies: Vec<Value> = questions.iter().map(Question::body).collect();
    let server = Server::start(&["--dtype", "bf16"]);
    assert!(server.start[0].ends_with("bf16"), "{:?}", server.start);
    let answers = shuffled(&server, &bodies);
    let right = right(questions.iter().zip(&answers));
    println!("right of 50, bf16: {right:?}");
    assert_eq!(right.len(), 7);
    assert!(right.values().all(|&right| right >= 49), "{right:?}");
}

#[test]
fn greedy_texts_and_token_counts_are_those_of_transformers_and_peft() {
    for (line, answer) in &mixed().greedy {
        // The base's stories are near ties: many continuations are equally good.
        if line.adapter.is_some() {
            assert_eq!(answer.text, line.text, "{line:?}");
        }
        assert_eq!(answer.usage["prompt_tokens"], line.prompt_ids.len(), "{line:?}");
        if answer.text == line.text {
            // The closing token is one of the answer's.
            assert_eq!(answer.usage["completion_tokens"], line.greedy_ids.len(), "{line:?}");
        }
    }
    let same = mixed().greedy.iter().filter(|(line, answer)| answer.text == line.text).count();
    println!("greedy.jsonl over HTTP: {same} of {} texts are equal", mixed().greedy.len());
}

#[test]
fn an_answer_alone_or_streamed_is_the_answer_in_the_mixed_run() {
    let mixed = mixed();
    let server = Server::start(&[]);
    let mut client = Client::connect(server.address);
    let questions = mixed.questions.iter().step_by(11).map(|(q, answer)| (q.body(), answer));
    let stories = mixed.stories.iter().map(|(body, answer)| (body.clone(), answer));
    for (mut body, together) in questions.chain(stories) {
        assert_eq!(ask(&mut client, &body), *together, "alone: {body}");
        body["stream"] = json!(true);
        let mut text = String::new();
        for data in client.stream(CHAT, &body).filter(|data| data != "[DONE]") {
            let chunk: Value = serde_json::from_str(&data).unwrap();
            text.push_str(chunk["choices"][0]["delta"]["content"].as_str().unwrap_or(""));
        }
        assert_eq!(text, together.text, "streamed: {body}");
    }
}

/// C08: turning LoRA on changed answers of requests that use no adapter.
#[test]
fn c08_base_answers_are_the_same_without_lora_as_beside_busy_adapters() {
    let server = Server::start(&["--no-lora"]);
    let mixed = mixed();
    let questions = mixed.questions.iter().map(|(q, answer)| (q.body(), answer));
    let stories = mixed.stories.iter().map(|(body, answer)| (body.clone(), answer));
    let greedy = mixed.greedy.iter().map(|(line, answer)| (greedy_body(line), answer));
    let (bodies, with_lora): (Vec<Value>, Vec<&Answer>) =
        questions.chain(stories).chain(greedy).filter(|(body, _)| body["model"] == BASE).unzip();
    assert!(bodies.len() >= 60);
    for (answer, with_lora) in ask_together(&server, &bodies, 4).iter().zip(with_lora) {
        assert_eq!(answer, with_lora);
    }
    let refused =
        Client::connect(server.address).post(CHAT, &crate::questions::chat(ADAPTERS[0], "x"));
    assert_eq!(refused.status, 404, "no adapter is there: {refused:?}");
}

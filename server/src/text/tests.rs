//! Encodings, chat texts and streaming against the stored answers of transformers.

use amphora_engine::Detokenize;
use amphora_model::ModelFiles;
use serde_json::Value;

use super::chat::TemplateSource;
use super::{Render, Text, TextError, TextFiles};
use crate::demo_assets;

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tokenizer_golden.json");
    serde_json::from_slice(&std::fs::read(path).expect("golden file")).expect("golden file")
}

fn text() -> Text {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models/gpt_oss");
    let files = ModelFiles::open(folder.as_ref()).expect("golden model");
    Text::new(&TextFiles::of(&files).expect("golden model")).expect("golden model")
}

fn demo_files() -> TextFiles {
    TextFiles::of(&demo_assets::model().expect("demo model")).expect("demo model")
}

fn with_template(source: &str) -> TextFiles {
    let template = TemplateSource { file: "chat_template.jinja".into(), source: source.into() };
    TextFiles { chat_template: Some(template), ..demo_files() }
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("token ids")
}

fn stream(text: &Text, ids: &[u32]) -> String {
    let mut detokenizer = text.detokenizer();
    let mut out: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    out.push_str(&detokenizer.flush());
    out
}

#[test]
fn encodings_are_those_of_transformers() {
    let text = text();
    for case in golden()["encode"].as_array().expect("list") {
        let source = case["text"].as_str().expect("text");
        assert_eq!(text.encode_prompt(source).expect("encode"), ids(&case["ids"]), "{source:?}");
        let decoded = case["decoded_skip_special"].as_str().expect("text");
        assert_eq!(stream(&text, &ids(&case["ids"])), decoded, "{source:?}");
    }
}

#[test]
fn chats_are_rendered_as_by_transformers() {
    let text = text();
    let golden = golden();
    for case in golden["chat"].as_array().expect("list") {
        let render = Render {
            messages: &case["messages"],
            tools: Some(&case["tools"]).filter(|tools| !tools.is_null()),
            add_generation_prompt: case["add_generation_prompt"] == true,
        };
        let rendered = text.chat().and_then(|chat| chat.render(&render)).expect("render");
        assert_eq!(rendered, case["text"].as_str().expect("text"));
        assert_eq!(text.encode_rendered(&rendered).expect("encode"), ids(&case["ids"]));
    }
}

#[test]
fn a_template_refuses_in_its_own_words() {
    let bad = &golden()["bad_chat"];
    let render = Render { messages: &bad["messages"], tools: None, add_generation_prompt: true };
    let text = text();
    let error = text.chat().and_then(|chat| chat.render(&render)).expect_err("alien role");
    let wanted = bad["error_contains"].as_str().expect("text");
    assert!(error.to_string().contains(wanted), "{error}");
}

#[test]
fn streamed_text_grows_by_whole_characters() {
    let golden = golden();
    let case = &golden["incremental_decode"];
    let text = text();
    let mut detokenizer = text.detokenizer();
    let mut out = String::new();
    for (id, prefix) in
        ids(&case["ids"]).into_iter().zip(case["prefix_texts"].as_array().expect("list"))
    {
        out.push_str(&detokenizer.push(id));
        let prefix = prefix.as_str().expect("text").trim_end_matches(char::REPLACEMENT_CHARACTER);
        assert_eq!(out, prefix);
    }
    assert_eq!(detokenizer.flush(), "");
}

#[test]
fn an_answer_cut_inside_a_character_shows_the_replacement() {
    let text = text();
    let mut ids = text.encode_prompt("ok 🙂").expect("encode");
    ids.pop();
    assert_eq!(stream(&text, &ids), "ok \u{fffd}");
}

#[test]
fn any_tokens_stream_to_what_they_decode_to() {
    // Random ids are mostly invalid UTF-8: the worst case for what is held back.
    let text = text();
    let mut state = 1_u64;
    for length in [1_usize, 2, 5, 40, 200] {
        let ids: Vec<u32> = (0..length)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) as u32 % 450
            })
            .collect();
        let known: Vec<u32> = ids.iter().copied().filter(|&id| id < 400).collect();
        let whole = text.tokenizer.decode(&known, true).expect("decode");
        assert_eq!(stream(&text, &ids), whole);
    }
}

#[test]
fn a_long_run_of_invalid_bytes_keeps_streaming() {
    let text = text();
    // Bytes that can start no character.
    let invalid = text.tokenizer.token_to_id("ÿ").expect("byte 0xff");
    let mut detokenizer = text.detokenizer();
    let early: String = (0..200).map(|_| detokenizer.push(invalid)).collect();
    assert!(early.chars().count() >= 190, "{}", early.chars().count());
    let rest = detokenizer.flush();
    assert_eq!(early.chars().count() + rest.chars().count(), 200);
}

#[test]
fn python_idioms_of_templates_work() {
    let source = "{% for m in messages if m.role != 'system' %}{% if m.role == 'stop' %}{% break %}{% endif %}\
        {{ m.content.strip().upper() }}{{ m.get('name', '-') }}{% endfor %}\
        {{ {'a': '<&>', 'b': [1, none]} | tojson }}{{ [1] | tojson(indent=1) }}{{ bos_token is defined }}\
        {% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}{{ strftime_now('%Y')|length }}";
    let files = with_template(source);
    let text = Text::new(&files).expect("template");
    let messages = serde_json::json!([
        {"role": "system", "content": "x"}, {"role": "user", "content": " hi "}, {"role": "stop"}
    ]);
    let render = Render { messages: &messages, tools: None, add_generation_prompt: true };
    let out = text.chat().and_then(|chat| chat.render(&render)).expect("render");
    assert_eq!(out, "HI-{\"a\": \"<&>\", \"b\": [1, null]}[\n 1\n]True24");
}

#[test]
fn a_broken_template_is_refused_by_file_and_line() {
    let files = with_template("{% if %}");
    let error = Text::new(&files).err().expect("refusal");
    assert!(
        matches!(&error, TextError::File { file, .. } if file == "chat_template.jinja"),
        "{error}"
    );
}

#[test]
fn the_demo_model_knows_its_chat_and_its_length() {
    let files = demo_files();
    assert_eq!(files.max_new_tokens().expect("demo"), Some(128));
    assert!(files.not_applied().expect("demo").is_empty());
    let text = Text::new(&files).expect("demo");
    let messages = serde_json::json!([{"role": "user", "content": "Hi"}]);
    let render = Render { messages: &messages, tools: None, add_generation_prompt: true };
    let rendered = text.chat().and_then(|chat| chat.render(&render)).expect("render");
    assert_eq!(rendered, "<|begin|><|user|>Hi<|end|><|assistant|>");
}

#[test]
fn the_demo_prompts_encode_to_the_stored_tokens() {
    let text = Text::new(&demo_files()).expect("demo");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/demo-model/eval/greedy.jsonl");
    let lines = std::fs::read_to_string(path).expect("eval file");
    for line in lines.lines() {
        let case: Value = serde_json::from_str(line).expect("json line");
        let messages = serde_json::json!([{"role": "user", "content": case["prompt"]}]);
        let render = Render { messages: &messages, tools: None, add_generation_prompt: true };
        let rendered = text.chat().and_then(|chat| chat.render(&render)).expect("render");
        assert_eq!(text.encode_rendered(&rendered).expect("encode"), ids(&case["prompt_ids"]));
        assert_eq!(stream(&text, &ids(&case["greedy_ids"])), case["text"].as_str().expect("text"));
    }
}

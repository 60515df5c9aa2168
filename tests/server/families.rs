//! Each family's stored model through the binary: started from its folder, asked over HTTP, scored.

use amphora_tests::golden::{F32_TOLERANCE, PROMPTS, Run, worst};
use serde_json::{Value, json};

use crate::binary::{Server, run};
use crate::http::Client;
use crate::questions::{CHAT, COMPLETIONS};
use crate::score::{Folder, read, score, write_lines};

const FAMILIES: [&str; 5] = ["qwen3_moe", "qwen3_moe_sparse", "mixtral", "llama", "qwen3"];

fn folder(model: &str) -> String {
    format!("tests/golden/models/{model}")
}

#[test]
fn each_family_is_scored_as_stored() {
    for model in FAMILIES {
        let files = Folder::new(&format!("family-{model}"));
        let (input, output) = (files.file("in.jsonl"), files.file("out.safetensors"));
        let base = Run::read(model, None).unwrap();
        let prompts = PROMPTS.map(|name| (name, base.prompt(name).unwrap()));
        let lines: Vec<Value> = prompts
            .iter()
            .map(|(name, stored)| {
                let new_tokens = stored.greedy_ids.len();
                json!({"id": name, "tokens": stored.tokens, "max_new_tokens": new_tokens})
            })
            .collect();
        write_lines(&input, &lines);
        score(&["--model", &folder(model)], &input, &output);
        for (name, stored) in &prompts {
            let scored = read(&output, name);
            let (off, at) = worst(&scored.logits, &stored.logits);
            assert!(off <= F32_TOLERANCE, "{model} {name}: logit {at} is off by {off}");
            let ids: Vec<i64> = stored.greedy_ids.iter().map(|&id| i64::from(id)).collect();
            assert_eq!(scored.ids, ids, "{model} {name}");
        }
    }
}

#[test]
fn each_family_chats_by_its_own_template() {
    for model in FAMILIES {
        let server = Server::start(&["--model", &folder(model)]);
        let mut client = Client::connect(server.address);
        let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6,
            "temperature": 0});
        let reply = client.post(CHAT, &body).ok();
        let tokens = reply["usage"]["completion_tokens"].as_u64().unwrap();
        assert!((1..=6).contains(&tokens), "{model}: {reply}");
        let whole = run(&["generate", "--model", &folder(model), "--max-tokens", "4", "Hello"]);
        assert!(whole.status.success(), "{model}: {whole:?}");

        // What a tied head costs is said: 400 rows of f32, as wide as the model.
        let tied = server.start.iter().find_map(|line| {
            line.strip_prefix("the tied head is packed apart from the embedding: ")
        });
        let expected = match model {
            "llama" => Some("102,400 bytes of the weights"),
            "qwen3_moe_sparse" => Some("76,800 bytes of the weights"),
            _ => None,
        };
        assert_eq!(tied, expected, "{model}");
    }
}

/// Its files name the ends 1 and 4; with this adapter one prompt comes to each.
#[test]
fn an_answer_ends_at_any_of_several_ends() {
    let adapter = "attn=tests/golden/adapters/mixtral/attn_r8";
    let server = Server::start(&["--model", &folder("mixtral"), "--adapter", adapter]);
    let mut client = Client::connect(server.address);
    let run = Run::read("mixtral", Some("attn_r8")).unwrap();
    for (name, end) in [("p1", 1), ("p2", 4)] {
        let stored = run.prompt(name).unwrap();
        let tokens = stored.greedy_ids.iter().position(|&id| id == end).unwrap() + 1;
        assert!(!stored.greedy_ids[..tokens - 1].iter().any(|id| [1, 4].contains(id)));
        for (ignore_eos, reason, tokens) in [(false, "stop", tokens), (true, "length", 24)] {
            let body = json!({"model": "attn", "prompt": stored.tokens, "temperature": 0,
                "max_tokens": 24, "ignore_eos": ignore_eos});
            let reply = client.post(COMPLETIONS, &body).ok();
            assert_eq!(reply["choices"][0]["finish_reason"], reason, "{name}: {reply}");
            assert_eq!(reply["usage"]["completion_tokens"], tokens, "{name}: {reply}");
        }
    }
}

/// qwen3's vocabulary has 16 tokens more than its tokenizer.
#[test]
fn tokens_above_the_tokenizer_s_vocabulary_count_and_have_no_text() {
    let stored = Run::read("qwen3", None).unwrap().prompt("p0").unwrap();
    let above = stored.greedy_ids.iter().position(|&id| id >= 400).expect("one such token");
    let server = Server::start(&["--model", &folder("qwen3")]);
    let mut client = Client::connect(server.address);
    let mut ask = |prompt: &[u32], most: usize| {
        let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": most,
            "ignore_eos": true});
        client.post(COMPLETIONS, &body)
    };
    let [before, with] = [above, above + 1].map(|most| ask(&stored.tokens, most).ok());
    assert_eq!(with["usage"]["completion_tokens"], above + 1);
    assert_eq!(with["choices"][0]["text"], before["choices"][0]["text"]);
    assert!(before["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()));
    assert_eq!(ask(&[70, 415], 2).status, 200);
    let refused = ask(&[70, 416], 2);
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("416"), "{}", refused.body);
}

#[test]
fn families_that_are_to_come_are_refused_by_name() {
    let files = Folder::new("to-come");
    for model_type in ["deepseek_v2", "deepseek_v3", "llama4"] {
        let config = json!({"model_type": model_type}).to_string();
        std::fs::write(files.file("config.json"), config).unwrap();
        std::fs::copy("golden/models/llama/model.safetensors", files.file("model.safetensors"))
            .unwrap();
        let folder = files.file("");
        run(&["serve", "--port", "0", "--model", &folder]).assert_refused(&[
            model_type,
            "not supported yet",
            "mixtral",
        ]);
    }
}

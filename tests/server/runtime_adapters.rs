//! Adapters that are loaded, replaced and unloaded over HTTP while the server serves.

use amphora_tests::peft;
use serde_json::{Value, json};

use crate::binary::{Server, root};
use crate::http::{Client, Reply};
use crate::questions::{BASE, CHAT, SENTENCE, ask, chat};

const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

/// A server of the demo model whose clients may load from the demo's adapters.
fn server() -> Server {
    let folder = root().join("assets/demo-model/adapters");
    Server::start(&["--adapter-root", folder.to_str().unwrap()])
}

fn load(client: &mut Client, name: &str, path: &str) -> Reply {
    client.post(LOAD, &json!({"lora_name": name, "lora_path": path}))
}

fn names(client: &mut Client) -> Vec<String> {
    let list = client.get("/v1/models").ok();
    let models = list["data"].as_array().unwrap().iter();
    models.map(|model| model["id"].as_str().unwrap().to_owned()).collect()
}

fn text(client: &mut Client, model: &str) -> String {
    ask(client, &chat(model, SENTENCE)).text
}

#[test]
fn an_adapter_is_loaded_asked_and_unloaded() {
    let server = server();
    let mut client = Client::connect(server.address);
    let before = names(&mut client);
    let loaded = load(&mut client, "org/new", "pirate").ok();
    assert_eq!((&loaded["id"], &loaded["parent"]), (&json!("org/new"), &json!(BASE)));
    assert!(names(&mut client).contains(&"org/new".to_owned()));
    assert_eq!(text(&mut client, "org/new"), text(&mut client, "pirate"));

    let again = load(&mut client, "org/new", "sql");
    assert_eq!(again.status, 400, "{again:?}");
    assert_eq!(again.json()["error"]["param"], "lora_name");
    assert_eq!(text(&mut client, "org/new"), text(&mut client, "pirate"));

    let gone = client.post(UNLOAD, &json!({"lora_name": "org/new"})).ok();
    assert_eq!(gone["deleted"], true);
    assert_eq!(names(&mut client), before);
    assert_eq!(client.post(CHAT, &chat("org/new", SENTENCE)).status, 404);
    assert_eq!(client.post(UNLOAD, &json!({"lora_name": "org/new"})).status, 404);
}

/// C10: an adapter replaced under its name answers as itself, and no key or value that the one
/// before it computed is used again.
#[test]
fn c10_a_replaced_adapter_uses_nothing_of_the_one_before() {
    let server = server();
    let mut client = Client::connect(server.address);
    let mut put = |path: &str| {
        let body = json!({"lora_name": "x", "lora_path": path, "load_inplace": true});
        client.post(LOAD, &body).ok();
        let answer = ask(&mut client, &chat("x", SENTENCE));
        (answer.text, text(&mut client, path), answer.usage["prompt_tokens_details"].clone())
    };
    for path in ["pirate", "sql", "pirate"] {
        let (answer, alone, cached) = put(path);
        assert_eq!(answer, alone, "{path}");
        assert_eq!(cached["cached_tokens"], 0, "{path}");
    }
}

/// C03: an adapter whose names match no module is refused with status 400, their number and examples;
/// no list has it, and the others answer as before.
#[test]
fn c03_an_adapter_that_matches_nothing_is_refused_and_never_listed() {
    let golden = root().join("tests/golden");
    let good = golden.join("adapters/qwen3_moe/attn_r8");
    let tensors = peft::read(&good.join("adapter_model.safetensors")).unwrap();
    let count = tensors.len();
    let renamed = tensors.into_iter().map(|(name, tensor)| {
        (name.replace("model.layers", "model.language_model.layers"), tensor)
    });
    let folder = std::env::temp_dir().join(format!("amphora-c03-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("renamed")).unwrap();
    std::fs::copy(good.join("adapter_config.json"), folder.join("renamed/adapter_config.json"))
        .unwrap();
    let file = folder.join("renamed/adapter_model.safetensors");
    std::fs::write(file, peft::write(&renamed.collect())).unwrap();

    let model = golden.join("models/qwen3_moe");
    let named = format!("good={}", good.display());
    let server = Server::start(&[
        "--model",
        model.to_str().unwrap(),
        "--adapter",
        &named,
        "--adapter-root",
        folder.to_str().unwrap(),
    ]);
    let mut client = Client::connect(server.address);
    let ask = |client: &mut Client| {
        let prompt =
            json!({"model": "good", "prompt": SENTENCE, "max_tokens": 12, "temperature": 0});
        client.post("/v1/completions", &prompt).ok()["choices"][0]["text"].clone()
    };
    let (before, answer) = (names(&mut client), ask(&mut client));
    for name in ["bad", "good"] {
        let body = json!({"lora_name": name, "lora_path": "renamed", "load_inplace": true});
        let reply = client.post(LOAD, &body);
        assert_eq!(reply.status, 400, "{reply:?}");
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        let told = format!("{count} of {count} tensors match no module");
        assert!(message.contains(&told), "{message}");
        assert!(message.contains("model.language_model.layers.0.self_attn"), "{message}");
    }
    assert_eq!(names(&mut client), before);
    assert_eq!(ask(&mut client), answer);
    std::fs::remove_dir_all(folder).unwrap();
}

/// A refused adapter says why with status 400 and changes nothing.
#[test]
fn a_refused_adapter_changes_nothing() {
    let server = Server::start(&["--adapter-root", root().join("tests/golden").to_str().unwrap()]);
    let mut client = Client::connect(server.address);
    let before = names(&mut client);
    let pirate = text(&mut client, "pirate");
    for (name, path, param) in [
        // For another model.
        ("new", "adapters/gpt_oss/attn_r8", "lora_path"),
        ("pirate", "adapters/gpt_oss/attn_r8", "lora_name"),
        (BASE, "adapters/gpt_oss/attn_r8", "lora_name"),
        // Nothing to be called.
        ("", "adapters/gpt_oss/attn_r8", "lora_name"),
        ("a\n", "adapters/gpt_oss/attn_r8", "lora_name"),
        ("a/../b", "adapters/gpt_oss/attn_r8", "lora_name"),
        ("a\\b", "adapters/gpt_oss/attn_r8", "lora_name"),
        ("\u{202e}", "adapters/gpt_oss/attn_r8", "lora_name"),
        (&"x".repeat(257), "adapters/gpt_oss/attn_r8", "lora_name"),
        // Not an adapter, not a folder, not inside.
        ("new", "models", "lora_path"),
        ("new", "ghost", "lora_path"),
        ("new", "../..", "lora_path"),
        ("new", "/", "lora_path"),
    ] {
        let reply = load(&mut client, name, path);
        assert_eq!(reply.status, 400, "{name} {path}: {reply:?}");
        assert_eq!(reply.json()["error"]["param"], param, "{name} {path}: {reply:?}");
    }
    let replace = json!({
        "lora_name": "pirate", "lora_path": "adapters/gpt_oss/attn_r8", "load_inplace": true,
    });
    assert_eq!(client.post(LOAD, &replace).status, 400);
    assert_eq!(names(&mut client), before);
    assert_eq!(text(&mut client, "pirate"), pirate);
}

#[test]
fn without_a_root_no_client_changes_the_adapters() {
    let mut client = Client::connect(Server::shared().address);
    for (path, body) in [
        (LOAD, json!({"lora_name": "x", "lora_path": "pirate"})),
        (UNLOAD, json!({"lora_name": "pirate"})),
    ] {
        let reply = client.post(path, &body);
        assert_eq!(reply.status, 403, "{reply:?}");
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("--adapter-root"), "{message}");
    }
}

#[test]
fn more_requests_than_places_are_told_to_come_again() {
    let server = Server::start(&["--max-requests", "2"]);
    let mut client = Client::connect(server.address);
    let prompts =
        |count: usize| json!({"model": BASE, "prompt": vec!["a"; count], "max_tokens": 1});
    assert_eq!(client.post("/v1/completions", &prompts(2)).status, 200);
    let reply = client.post("/v1/completions", &prompts(3));
    assert_eq!(reply.status, 429, "{reply:?}");
    assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
    // Places come back, however a request ends.
    let mut broken = prompts(1);
    broken["model"] = Value::from("ghost");
    for _ in 0..5 {
        assert_eq!(client.post("/v1/completions", &broken).status, 404);
    }
    assert_eq!(client.post("/v1/completions", &prompts(2)).status, 200);
}

#[test]
fn metrics_count_what_was_answered() {
    let mut client = Client::connect(Server::shared().address);
    let count = |client: &mut Client| -> u64 {
        let text = client.get("/metrics").body;
        let line =
            text.lines().find_map(|line| line.strip_prefix("amphora_generation_tokens_total "));
        line.expect("the counter").parse().expect("a number")
    };
    let before = count(&mut client);
    text(&mut client, "sql");
    assert!(count(&mut client) > before);
}

/// C13: references are given back once on every way out, so an adapter with many answers under way,
/// one of them abandoned, is unloaded at once and the server goes on.
#[test]
fn c13_unload_does_not_wait_for_abandoned_answers() {
    let server = server();
    let mut client = Client::connect(server.address);
    load(&mut client, "a", "pirate").ok();
    let mut body = chat("a", "Tell me a story about a fox and a lamp.");
    body["temperature"] = json!(1);
    body["n"] = json!(16);
    body["max_tokens"] = json!(40);
    std::thread::scope(|scope| {
        let whole: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| Client::connect(server.address).post(CHAT, &body).ok()))
            .collect();
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let mut leaver = Client::connect(server.address);
        assert!(leaver.stream(CHAT, &streamed).take(20).count() == 20, "in the middle");
        drop(leaver);
        // Taken out of the names at once; its answers go on.
        client.post(UNLOAD, &json!({"lora_name": "a"})).ok();
        assert_eq!(client.post(CHAT, &chat("a", SENTENCE)).status, 404);
        assert!(!text(&mut client, "pirate").is_empty());
        for answer in whole {
            let choices = answer.join().unwrap()["choices"].as_array().unwrap().clone();
            assert_eq!(choices.len(), 16);
        }
    });
    // With the last answer, nothing of it is left on the device beside the demo's six.
    let hot = || {
        let text = Client::connect(server.address).get("/metrics").body;
        let mut lines = text.lines();
        lines.find_map(|line| line.strip_prefix("amphora_adapters_hot ")?.parse::<u64>().ok())
    };
    text(&mut client, BASE);
    assert!(hot().is_some_and(|hot| hot <= 6), "{:?}", hot());
}

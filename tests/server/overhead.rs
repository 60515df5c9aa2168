//! What LoRA costs where nobody uses it (C19: memory and speed by the highest rank and the number of
//! slots, even unused), and how soon the demo is ready. Measurements: run them on a quiet machine,
//! on a release build, named by `AMPHORA_TEST_BINARY`:
//!
//! ```sh
//! cargo build --release
//! AMPHORA_TEST_BINARY=$PWD/target/release/amphora cargo test -p amphora-tests --test server -- \
//!     --ignored --nocapture --test-threads 1
//! ```

use std::time::Instant;

use serde_json::json;

use crate::binary::{Server, run};
use crate::http::Client;
use crate::questions::{CHAT, ask_together, chat};

/// A demo folder without its adapters, the limits as high as C19 has them.
const WITH_LORA: &[&str] =
    &["--model=assets/demo-model", "--threads=1", "--max-lora-rank=256", "--adapter-slots=64"];
const WITHOUT: &[&str] = &["--model=assets/demo-model", "--threads=1", "--no-lora"];
/// Pairs of runs on two servers that are both up, their order alternating.
const ROUNDS: usize = 11;
const SEQUENCES: usize = 8;
const TOKENS: usize = 1000;

/// Tokens of one run for each tick of the server's processor time, which, on one thread, depends
/// little on what else the machine does.
fn speed(server: &Server) -> f64 {
    let mut body = chat("demo-model", "Tell me a story about a fox and a lamp.");
    body["max_tokens"] = json!(TOKENS);
    body["ignore_eos"] = json!(true);
    let began = ticks(server.pid());
    ask_together(server, &vec![body; SEQUENCES], SEQUENCES);
    (SEQUENCES * TOKENS) as f64 / (ticks(server.pid()) - began)
}

/// Processor time so far, in the kernel's ticks.
fn ticks(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // Fields 14 and 15, user and system time; the second may hold blanks but ends with ")".
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()
}

/// Resident KiB.
fn resident(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
#[ignore = "a measurement, for a quiet machine and a release build"]
fn c19_lora_with_no_adapter_costs_at_most_2_percent_memory_and_3_percent_speed() {
    let (on, off) = (Server::start(WITH_LORA), Server::start(WITHOUT));
    speed(&on);
    speed(&off);
    let memory = resident(on.pid()) / resident(off.pid());
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        let (with, without) = if round % 2 == 0 {
            let without = speed(&off);
            (speed(&on), without)
        } else {
            (speed(&on), speed(&off))
        };
        println!("round {round}: {with:.2} tokens a tick on, {without:.2} off");
        ratios.push(with / without);
    }
    let speed = median(ratios);
    println!(
        "LoRA on, none loaded, against off: memory {} KiB, x{memory:.4}; speed x{speed:.4}",
        resident(on.pid())
    );
    assert!(memory <= 1.02, "memory x{memory:.4}");
    assert!(speed >= 0.97, "speed x{speed:.4}");
}

#[test]
#[ignore = "a measurement, for a quiet machine and a release build"]
fn the_demo_model_is_ready_in_less_than_a_second() {
    let ready = |lines: &str| -> f64 {
        let rest = lines.split("ready in ").nth(1).expect("it says how soon it was ready");
        rest.split(' ').next().unwrap().parse().unwrap()
    };
    for _ in 0..3 {
        let demo = ready(&run(&["demo"]).out);
        let began = Instant::now();
        let server = Server::start(&[]);
        let whole = began.elapsed().as_secs_f64();
        assert_eq!(Client::connect(server.address).post(CHAT, &chat("sql", "x")).status, 200);
        println!(
            "demo ready in {demo} s; serve in {} s, listening {whole:.2} s after its start",
            ready(&server.start.join("\n"))
        );
        assert!(demo < 1.0 && whole < 1.0);
    }
}

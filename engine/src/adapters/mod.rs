//! The adapter store: what an adapter may be called (`name`), which adapter is where (`ledger`), who
//! holds which bytes (`pages`), which images are in host memory (`images`), who reads the others again
//! (`reader`), and what moves them (`pool`).

mod images;
pub mod ledger;
pub mod name;
pub mod pages;
pub mod pool;
pub mod reader;

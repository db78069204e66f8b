//! A million malformed scripts: the parser answers each with a request or with errors, and never panics.

/// xorshift64*: enough randomness for inputs, no dependency, and a seed that reproduces a failure.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Pieces that reach every branch of the parser far more often than plain random bytes would.
const PIECES: &[&[u8]] = &[
    b"#RSA_",
    b"#RSA_DATA_IN=",
    b"#RSA_DATA_OUT=",
    b"#RSA_STAGE_IN=",
    b"#RSA_POSTPROCESS=",
    b"#RSA_DELAY=",
    b"#RSA_CAPACITY=",
    b"#RSA_NODES=",
    b"#RSA_ENGINE=",
    b"#RSA_PACK=",
    b"#RSA_WAIT=",
    b"#RSA_OUT_SIZE=",
    b"#RSA_COPY_OUT_INTERVAL=",
    b"#RSA_LAYOUT=",
    b"#RSA_LAYOUT_DIR=",
    b"#RSA_IO=",
    b"# RSA_DATA_IN=",
    b"\n",
    b"\n",
    b"\r\n",
    b"\0",
    b"\"",
    b"'",
    b" #",
    b"=",
    b" ",
    b"\t",
    b"/a/b",
    b"$HOME",
    b"~",
    b"300",
    b"5m",
    b"1h30m",
    b"4GiB",
    b"1.5T",
    b"18446744073709551616",
    b"-1",
    b"99999d",
    b"tar",
    b"tar.zst",
    b"hold",
    b"-c 4 -S 1M",
    b":",
    b":keep",
    b"shared",
    b"heavy",
    b"gluster",
    b"\xff\xfe",
    "é€😀".as_bytes(),
    b"#!/bin/sh\n",
    b"echo\n",
    b".",
    b"..",
];

#[test]
fn a_million_random_scripts_never_panic_the_parser() {
    let mut random = Random(0x0DD5_EED5);
    let mut script = Vec::new();
    let (mut requests, mut refusals) = (0_u32, 0_u32);
    for _ in 0..1_000_000 {
        script.clear();
        for _ in 0..random.below(12) {
            if random.below(4) == 0 {
                for _ in 0..random.below(6) {
                    script.push(random.next() as u8);
                }
            } else {
                script.extend_from_slice(PIECES[random.below(PIECES.len())]);
            }
        }
        match ondeck_directive::parse(&script) {
            Ok(_) => requests += 1,
            Err(errors) => {
                refusals += 1;
                let lines = script.split(|b| *b == b'\n').count();
                for error in errors {
                    assert!((1..=lines).contains(&error.line) && !error.remedy.is_empty(), "{error}");
                    assert!(error.to_string().len() < 1_500, "a message stays short: {error}");
                }
            }
        }
    }
    // Both outcomes must be common, or the inputs test nothing.
    assert!(requests > 100_000 && refusals > 100_000, "{requests} requests, {refusals} refusals");
}

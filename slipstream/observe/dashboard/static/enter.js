// The page that the printed address leads to: keeps the key where only pages of this port can read it, and forgets the token.

localStorage.setItem("slipstream-key", document.querySelector("meta[name=key]").content);
location.replace("/");
